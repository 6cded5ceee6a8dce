"""The real model: SmolLM2-135M-Instruct, token for token what transformers generates.

The reference outputs are greedy, float32, by transformers on the weights of the same GGUF. One set of weights serves
all engines here; layers are scanned in all but one of them, which costs a little time a step and saves a lot of
compiling.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from jpaged import LLM, EngineConfig, SamplingParams
from jpaged.baseline.static import StaticEngine
from jpaged.models.llama import load_decoder
from jpaged.models.load import load_checkpoint, resolve
from jpaged.request import Request
from jpaged.runtime.engine import Engine

CASES = json.loads((Path(__file__).parents[1] / "data" / "smollm2-greedy.json").read_text())["cases"]
LONGEST = max(len(c["prompt_token_ids"]) + c["max_tokens"] for c in CASES)
CONFIG = EngineConfig(
    page_size=16, num_pages=400, max_num_seqs=16, max_num_batched_tokens=128, token_budgets=(16, 128),
    max_model_len=LONGEST, dtype="float32",
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    checkpoint = load_checkpoint(resolve("smollm2-135m"))
    decoder, params = load_decoder(checkpoint.config, checkpoint.parameters("float32"), jnp.float32, stacked=True)
    return decoder, params, checkpoint.config


def requests_of(cases, n: int = 1) -> list[Request]:
    params = [SamplingParams(temperature=0, max_tokens=c["max_tokens"], n=n) for c in cases]
    each = zip(cases, params, strict=True)
    return [Request(str(c["id"]), tuple(c["prompt_token_ids"]), own) for c, own in each]


def run(engine, requests) -> dict[str, list[dict]]:
    """By request, its continuations."""
    for request in requests:
        engine.submit(request)
    found = {
        r.request_id: [{"token_ids": [], "logprobs": [], "reason": None} for _ in range(r.params.n)] for r in requests
    }
    while engine.has_work:
        for event in engine.burst():
            one = found[event.request_id][event.index]
            if event.token_id is not None:
                one["token_ids"].append(event.token_id)
                one["logprobs"].append(event.logprob)
            one["reason"] = event.finish_reason
    return found


def assert_golden(found, cases=CASES):
    for case in cases:
        for one in found[str(case["id"])]:
            assert one["token_ids"] == case["output_token_ids"], f"case {case['id']}"
            assert one["reason"] == case["finish_reason"]
            assert one["logprobs"] == pytest.approx(case["logprobs"], abs=1e-3)


def test_messages_and_texts_become_the_same_tokens_and_text():
    """The tokenizer, the template, unrolled layers, pages of 64 and the text that comes out, through the public API."""
    chats = [c for c in CASES if "messages" in c]
    texts = [c for c in CASES if "messages" not in c]
    assert chats and texts
    config = replace(CONFIG, page_size=64, num_pages=None, pool_bytes=200_000_000, max_model_len=None)
    with LLM("smollm2-135m", config=config) as llm:
        params = [[SamplingParams(temperature=0, max_tokens=c["max_tokens"]) for c in some] for some in (chats, texts)]
        answers = llm.chat([c["messages"] for c in chats], params[0], use_tqdm=False)
        answers += llm.generate([c["prompt"] for c in texts], params[1], use_tqdm=False)
        for case, answer in zip(chats + texts, answers, strict=True):
            completion = answer.outputs[0]
            assert answer.prompt_token_ids == case["prompt_token_ids"], f"case {case['id']}"
            assert completion.token_ids == case["output_token_ids"], f"case {case['id']}"
            assert completion.text == case["text"]
            assert completion.finish_reason == case["finish_reason"]
            pairs = zip(completion.logprobs, completion.token_ids, strict=True)
            logprobs = [one[token].logprob for one, token in pairs]
            assert logprobs == pytest.approx(case["logprobs"], abs=1e-3)
            assert completion.cumulative_logprob == pytest.approx(sum(case["logprobs"]), abs=1e-2)
        stats = llm.stats()
        assert stats.in_use_pages == 0 and stats.running == stats.waiting == 0


def test_all_at_once_and_one_by_one(model):
    """One engine, both ways: neither neighbours nor what ran before change a token, nor what it left to be found. And
    where nothing is found: the same programs, the same tokens."""
    engine = Engine(*model, CONFIG)
    engine.warmup()
    programs = engine.num_programs
    assert_golden(run(engine, requests_of(CASES)))
    found = engine.stats().prefix_hits
    for case in CASES:
        assert_golden(run(engine, requests_of([case])), [case])
    assert engine.stats().prefix_hits - found > sum(len(c["prompt_token_ids"]) - 17 for c in CASES)
    alone = Engine(*model, replace(CONFIG, enable_prefix_caching=False))
    assert_golden(run(alone, requests_of(CASES)))
    assert alone.stats().prefix_hits == alone.stats().cached_pages == 0
    assert engine.num_programs == programs, "a program was compiled after warm-up"
    assert engine.stats().in_use_pages == 0


def test_in_reverse_with_pages_of_one_token_and_a_budget_of_16(model):
    config = replace(CONFIG, page_size=1, num_pages=6400, max_num_batched_tokens=16, token_budgets=(16,))
    engine = Engine(*model, config)
    assert_golden(run(engine, requests_of(CASES[::-1])))
    # Again, and each finds all of its prompt and of its output but the last token of the prompt, which it computes.
    before = engine.stats().prefix_hits
    assert_golden(run(engine, requests_of(CASES)))
    assert engine.stats().prefix_hits - before == sum(len(c["prompt_token_ids"]) - 1 for c in CASES)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("n", [1, 3])
def test_preemption_and_bursts(model, n, preemption, share):
    """The pool holds hardly more than the longest request: requests are thrown out and start again, forks as well, or
    wait on the host."""
    cases = CASES if n == 1 else [c for c in CASES if len(c["prompt_token_ids"]) < 100][:6]
    longest = max(len(c["prompt_token_ids"]) + c["max_tokens"] for c in cases)
    config = replace(
        CONFIG, num_pages=-(-longest // 16) + 4, max_model_len=longest, max_num_batched_tokens=64,
        token_budgets=(16, 64), steps_per_burst=3, enable_prefix_caching=share, preemption=preemption,
    )  # fmt: skip
    engine = Engine(*model, config)
    assert_golden(run(engine, requests_of(cases, n)), cases)
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.in_use_pages == 0
    assert (stats.swaps > 0) == (preemption == "swap")


def test_three_continuations_of_each_prompt(model):
    """Each prompt is computed once, and its last token by each, also where no page is found by what it holds."""
    cases = CASES[2:10]
    engine = Engine(*model, replace(CONFIG, enable_prefix_caching=False))
    assert_golden(run(engine, requests_of(cases, 3)), cases)
    prompts = sum(len(c["prompt_token_ids"]) for c in cases)
    outputs = sum(3 * (len(c["output_token_ids"]) - 1) for c in cases)
    assert engine.stats().useful_row_steps == prompts + 2 * len(cases) + outputs
    static = StaticEngine(*model, batch_size=8, max_model_len=LONGEST)
    assert_golden(run(static, requests_of(cases[:3], 3)), cases[:3])


def test_static_batching_gives_the_same_tokens(model):
    assert_golden(run(StaticEngine(*model, batch_size=8, max_model_len=LONGEST), requests_of(CASES)))
