"""Who goes first: priorities, and policies of one's own."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from support.shapes import STUB_MODEL
from support.stubs import HistoryDecoder

from jpaged.config import EngineConfig
from jpaged.policy import by_priority, first_come_first_served, longest_prefix_hit_first, shortest_prompt_first
from jpaged.request import Request, SamplingParams
from jpaged.runtime.engine import Engine

VOCAB = 32
MODEL = replace(STUB_MODEL, vocab_size=VOCAB, eos_token_ids=(31,))
CONFIG = EngineConfig(
    page_size=4, num_pages=24, max_num_seqs=2, max_num_batched_tokens=16, token_budgets=(16,), max_queue=3,
    dtype="float32",
)  # fmt: skip
READER = HistoryDecoder(VOCAB)


def engine(**changes) -> Engine:
    return Engine(READER, (), MODEL, replace(CONFIG, **changes))


def submit(engine: Engine, name: str, prompt, tokens: int = 6, priority: int = 0) -> None:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    engine.submit(Request(name, tuple(prompt), params, priority=priority))


def ends(engine: Engine, at_burst=lambda burst: None) -> list[str]:
    """The requests in the order in which they ended, each checked against what it gets alone."""
    ended, tokens, burst = [], {}, 0
    prompts = {request.request_id: request for request, _ in engine.unfinished()}
    while engine.has_work:
        for event in engine.burst():
            tokens.setdefault(event.request_id, []).append(event.token_id)
            if event.finish_reason is not None:
                ended.append(event.request_id)
        prompts |= {request.request_id: request for request, _ in engine.unfinished()}
        at_burst(burst)
        burst += 1
        assert burst < 500, "the engine makes no progress"
    for name, request in prompts.items():
        known = list(request.prompt_token_ids)
        for token in tokens[name]:
            assert token == READER.following(known), name
            known.append(token)
    return ended


def test_the_smaller_priority_comes_in_first_also_from_the_host():
    """Catches: a queue on the host that is fed in order, whatever waits behind it."""
    one = engine(max_num_seqs=1)
    for number, priority in enumerate((0, 5, 0, -1, 5, 0, -1)):
        submit(one, str(number), [number] * 5, priority=priority)
    assert ends(one) == ["3", "6", "0", "2", "5", "1", "4"]


def test_who_stands_higher_takes_the_place_of_who_stands_lower():
    """Invariant 2: the first of the highest priority always goes on, though others hold every slot. The others get
    the same tokens all the same, and no other request is sent back."""
    busy = engine()
    submit(busy, "a", [1] * 9, tokens=30)
    submit(busy, "b", [2] * 9, tokens=30)

    def urgent(burst):
        if burst == 4:
            submit(busy, "equal", [3] * 5)
            submit(busy, "urgent", [4] * 5, priority=-1)

    assert ends(busy, urgent) == ["urgent", "a", "equal", "b"]
    assert busy.stats().preemptions == 1


def test_nobody_goes_for_one_who_does_not_come_in_even_so():
    """Catches: victims for a request whose pages an equal holds."""
    busy = engine(num_pages=16, max_model_len=64)
    submit(busy, "equal", [1] * 30, tokens=30, priority=-1)
    submit(busy, "lower", [2] * 5, tokens=6)

    def large(burst):
        if burst == 6:
            submit(busy, "large", [3] * 48, tokens=2, priority=-1)

    assert ends(busy, large) == ["lower", "equal", "large"]
    assert busy.stats().preemptions == 0


def test_a_policy_orders_the_queue():
    prompts = {"long": 20, "short": 3, "middle": 9}
    orders = {
        by_priority: ["long", "short", "middle"],
        first_come_first_served: ["long", "short", "middle"],
        shortest_prompt_first: ["short", "middle", "long"],
        (lambda requests: -requests.max_len): ["long", "middle", "short"],
    }
    for admission, order in orders.items():
        one = engine(max_num_seqs=1, admission=admission)
        for number, (name, length) in enumerate(prompts.items()):
            submit(one, name, [number] * length)
        assert ends(one) == order, admission


def test_who_finds_the_most_comes_in_first():
    one = engine(max_num_seqs=1, admission=longest_prefix_hit_first)
    submit(one, "first", range(12))
    ends(one)
    for name, prompt in {"none": [9] * 12, "one": [*range(4), *[9] * 8], "two": [*range(8), *[9] * 4]}.items():
        submit(one, name, prompt)
    assert ends(one) == ["two", "one", "none"]


def test_a_policy_changes_no_token_and_compiles_nothing_after_warmup():
    rng = np.random.default_rng(0)
    for policy in (shortest_prompt_first, lambda requests: (requests.arrival * 7919 % 13).astype(jnp.float32)):
        one = engine(num_pages=12, max_num_seqs=4, admission=policy, victim=policy, max_model_len=40)
        one.warmup()
        programs = one.num_programs
        for number in range(30):
            submit(one, str(number), rng.integers(0, 30, rng.integers(1, 20)), int(rng.integers(1, 15)), number % 3)
        assert len(ends(one)) == 30
        assert one.num_programs == programs and one.stats().preemptions > 0
        assert one.stats().in_use_pages == 0


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (lambda requests: 0, "must give each of 5 requests a number"),
        (lambda requests: requests.arrival > 0, "it gave bool"),
        (lambda requests: requests.arrival[None], "it gave int32"),
    ],
)
def test_a_policy_that_gives_no_order_is_refused_in_words(policy, words):
    with pytest.raises(ValueError, match=words):
        engine(admission=policy).warmup()


def test_what_is_no_policy_or_no_priority_is_refused():
    with pytest.raises(ValueError, match=r"victim must be a policy, a function as in .*; got 'lifo'"):
        EngineConfig(victim="lifo")
    with pytest.raises(ValueError, match="priority must be an integer of 32 bits; got 2147483648"):
        Request("a", (1,), SamplingParams(), priority=2**31)
    assert "admission=shortest_prompt_first" in repr(EngineConfig(admission=shortest_prompt_first))
