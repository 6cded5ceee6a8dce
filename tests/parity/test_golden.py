"""The real model: SmolLM2-135M-Instruct, token for token what transformers generates.

The reference outputs are greedy, float32, by transformers on the weights of the same GGUF. One test generates all of
them, through the public API; the others change how they are scheduled and take the first tokens of each, for on a CPU a
step of this model takes as long as its weights take to read. Engines differ in values where they can, since the shapes
of an engine are a program, which takes 12 to 16 seconds to compile.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from jpaged import LLM, EngineConfig, SamplingParams
from jpaged.baseline.static import StaticEngine
from jpaged.models.decoder import load_decoder
from jpaged.models.load import load_checkpoint, resolve
from jpaged.request import Request
from jpaged.runtime.engine import Engine

CASES = json.loads((Path(__file__).parents[1] / "data" / "smollm2-greedy.json").read_text())["cases"]
CONFIG = EngineConfig(
    page_size=16, num_pages=400, max_num_seqs=16, max_num_batched_tokens=128, token_budgets=(16, 128),
    max_model_len=max(len(c["prompt_token_ids"]) + c["max_tokens"] for c in CASES), dtype="float32",
)  # fmt: skip
#: one program, for decoding and for prompts
SMALL = replace(CONFIG, max_num_batched_tokens=16, token_budgets=(16,))


def beginnings(tokens: int, cases=CASES) -> list[dict]:
    """The cases, with the first `tokens` tokens of their outputs asked for and expected."""
    return [
        case
        | {
            "max_tokens": min(tokens, case["max_tokens"]),
            "output_token_ids": case["output_token_ids"][:tokens],
            "logprobs": case["logprobs"][:tokens],
            "finish_reason": "length" if len(case["output_token_ids"]) > tokens else case["finish_reason"],
        }
        for case in cases
    ]


#: without the one that is longer than all others together
SHORT = [c for c in CASES if len(c["prompt_token_ids"]) < 100]


@pytest.fixture(scope="module")
def model():
    checkpoint = load_checkpoint(resolve("smollm2-135m"))
    decoder, params = load_decoder(checkpoint.config, checkpoint.parameters("float32"), jnp.float32)
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


def assert_golden(found, cases):
    for case in cases:
        for one in found[str(case["id"])]:
            assert one["token_ids"] == case["output_token_ids"], f"case {case['id']}"
            assert one["reason"] == case["finish_reason"]
            assert one["logprobs"] == pytest.approx(case["logprobs"], abs=1e-3)


def test_messages_and_texts_become_the_same_tokens_and_text():
    """The tokenizer, the template, pages of 64 and the text that comes out, through the public API:
    every token of every case."""
    chats = [c for c in CASES if "messages" in c]
    texts = [c for c in CASES if "messages" not in c]
    assert chats and texts
    config = replace(SMALL, page_size=64, num_pages=None, pool_bytes=200_000_000, max_model_len=None)
    with LLM("smollm2-135m", config=config) as llm:
        params = [
            [SamplingParams(temperature=0, max_tokens=c["max_tokens"], logprobs=0) for c in some]
            for some in (chats, texts)
        ]
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


def test_all_at_once_and_one_by_one_and_three_continuations_of_each(model):
    """One engine, several ways: neither neighbours nor what ran before change a token, nor what it left to be found.
    And where nothing is found: the same programs, the same tokens; each prompt is computed once, and its last token by
    each continuation."""
    engine = Engine(*model, CONFIG)
    engine.warmup()
    programs = engine.num_programs
    cases = beginnings(24)
    assert_golden(run(engine, requests_of(cases)), cases)
    found = engine.stats().prefix_hits
    alone = beginnings(6)
    for case in alone:
        assert_golden(run(engine, requests_of([case])), [case])
    assert engine.stats().prefix_hits - found > sum(len(c["prompt_token_ids"]) - 17 for c in CASES)
    assert engine.num_programs == programs, "a program was compiled after warm-up"
    assert engine.stats().in_use_pages == 0

    unshared = Engine(*model, replace(CONFIG, enable_prefix_caching=False))
    cases = beginnings(12, CASES[2:10])
    assert_golden(run(unshared, requests_of(cases, 3)), cases)
    prompts = sum(len(c["prompt_token_ids"]) for c in cases)
    outputs = sum(3 * (len(c["output_token_ids"]) - 1) for c in cases)
    stats = unshared.stats()
    assert stats.useful_row_steps == prompts + 2 * len(cases) + outputs
    assert stats.prefix_hits == stats.cached_pages == 0


def test_in_reverse_with_pages_of_one_token_and_a_budget_of_16(model):
    cases = beginnings(16)
    engine = Engine(*model, replace(SMALL, page_size=1, num_pages=2000))
    assert_golden(run(engine, requests_of(cases[::-1])), cases)
    # Again, and each finds all of its prompt and of its output but the last token of the prompt, which it computes.
    before = engine.stats().prefix_hits
    assert_golden(run(engine, requests_of(cases)), cases)
    assert engine.stats().prefix_hits - before == sum(len(c["prompt_token_ids"]) - 1 for c in cases)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preemption_and_bursts(model, preemption):
    """The pool holds hardly more than the longest request: requests are thrown out and start again, forks as well, or
    wait on the host. With pages shared or not, once with three continuations each: both are values of one program."""
    cases = beginnings(16, SHORT[:8])
    longest = max(len(c["prompt_token_ids"]) + c["max_tokens"] for c in cases)
    config = replace(
        SMALL,
        page_size=4,
        num_pages=-(-longest // 4) + 2,
        max_model_len=longest,
        steps_per_burst=3,
        preemption=preemption,
    )
    forks, single = (True, False) if preemption == "swap" else (False, True)
    for share, some, n in ((forks, cases[:3], 3), (single, cases, 1)):
        engine = Engine(*model, replace(config, enable_prefix_caching=share))
        assert_golden(run(engine, requests_of(some, n)), some)
        stats = engine.stats()
        assert stats.preemptions > 0 and stats.in_use_pages == 0
        assert (stats.swaps > 0) == (preemption == "swap")


def test_static_batching_gives_the_same_tokens(model):
    """Two batches and a part of one; in the last, three continuations of each prompt."""
    cases = beginnings(24, SHORT)
    longest = max(len(c["prompt_token_ids"]) + c["max_tokens"] for c in cases)
    static = StaticEngine(*model, batch_size=8, max_model_len=longest)
    assert_golden(run(static, requests_of(cases)), cases)
    cases = beginnings(6, cases[:3])
    assert_golden(run(static, requests_of(cases, 3)), cases)
