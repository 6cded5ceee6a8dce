"""Sharing as a caller sees it: what is found computed, and that no token changes for it. The public faults of other
engines, by the names that the known-faults file gives them. A stub decoder reads back what a page holds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.shapes import STUB_MODEL
from support.stubs import HistoryDecoder, Traces

from jpaged.config import EngineConfig
from jpaged.request import FinishReason, Request, SamplingParams
from jpaged.runtime.engine import Engine
from jpaged.step import violations
from jpaged.step.sharing import index as prefix

VOCAB = 32
MODEL = replace(STUB_MODEL, vocab_size=VOCAB, eos_token_ids=(31,), max_position_embeddings=208)
CONFIG = EngineConfig(
    page_size=16, num_pages=40, max_num_seqs=4, max_num_batched_tokens=64, token_budgets=(64,), max_queue=4,
    max_model_len=208, dtype="float32",
)  # fmt: skip
SMALL = replace(CONFIG, num_pages=13)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
READER = HistoryDecoder(VOCAB, nan_token=31, traces=Traces())  # which it never emits


@dataclass(frozen=True)
class ShiftedReader:
    """A HistoryDecoder with a weight: what it stores and emits depends on it."""

    reader: HistoryDecoder = field(default_factory=lambda: HistoryDecoder(VOCAB))
    traces: Traces = field(default_factory=Traces)

    def __call__(self, params, pool, batch):
        self.traces.count += 1
        shifted = (batch.token_ids + params["shift"]) % VOCAB
        return self.reader(None, pool, replace(batch, token_ids=shifted))


SHIFTED = ShiftedReader()


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 30, length).tolist()


def alone(tokens, count: int = 8) -> list[int]:
    return READER.continuation(tokens, count)


@dataclass
class Served:
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    reason: FinishReason | None = None


def serve(engine: Engine, *prompts, params=GREEDY, salt: str | None = None, check=True) -> list[Served]:
    """What each prompt got, all at once; violations are looked for after every burst."""
    for number, tokens in enumerate(prompts):
        engine.submit(Request(str(number), tuple(tokens), params, cache_salt=salt))
    served = [Served() for _ in prompts]
    start = engine.stats().steps
    while engine.has_work:
        assert engine.stats().steps < start + 4000, "the engine makes no progress"
        for event in engine.burst():
            one = served[int(event.request_id)]
            one.tokens += [] if event.token_id is None else [event.token_id]
            one.cached, one.reason = event.num_cached_tokens, event.finish_reason
        assert not check or violations(engine.state) == []
        stats = engine.stats()
        assert stats.free_pages + stats.cached_pages + stats.in_use_pages == stats.total_pages
    return served


def make(config=CONFIG, decoder=READER, params=(), **changes) -> Engine:
    return Engine(decoder, params, MODEL, replace(config, **changes))


def test_two_prefixes_of_one_hash_are_two_prefixes(monkeypatch):
    """PC-01: the hash is the same for all. Catches: a hit taken for the hash alone, or for the tokens of one page
    without those before it."""
    monkeypatch.setattr(prefix, "token_hash", lambda token, position: jnp.zeros((*jnp.shape(token), 2), jnp.uint32))
    # Sizes that no other test has, for programs that no other test finds.
    engine = make(decoder=replace(READER, traces=Traces()), num_pages=39)
    one, other = prompt(1, 48), prompt(2, 48)
    twice = one[:16] * 2 + [3, 4]  # its second page holds what a first page held
    found = 0
    for tokens in (one, other, twice, one, other, twice):
        for served in serve(engine, tokens, tokens, check=False):  # the checker would find the hash wrong
            assert served.tokens == alone(tokens)
            found += served.cached
    assert found > 0, "nothing was looked up"


@pytest.mark.parametrize("length", [16, 32, 48, 33])
def test_a_prompt_that_is_cached_as_a_whole_is_computed_in_part(length):
    """PC-03: at least one token is computed, and what a continuation has computed is found too."""
    engine, tokens = make(), prompt(length, length)
    (first,), (second,) = serve(engine, tokens), serve(engine, tokens)
    assert first.tokens == second.tokens == alone(tokens)
    assert (first.cached, second.cached) == (0, (length - 1) // 16 * 16)
    (longer,) = serve(engine, tokens + alone(tokens, 16), params=replace(GREEDY, max_tokens=1))
    assert longer.cached >= length // 16 * 16


def test_what_a_request_generated_is_found():
    """A page holds what it holds, whoever asked for it: the next turn of a chat finds the last answer."""
    engine, tokens = make(), prompt(3, 20)
    (first,) = serve(engine, tokens, params=replace(GREEDY, max_tokens=29))
    (next_turn,) = serve(engine, tokens + first.tokens + [5, 6])
    assert next_turn.cached == 48 == (20 + 28) // 16 * 16  # the last token was not computed
    assert next_turn.tokens == alone(tokens + first.tokens + [5, 6])
    # And so does one who sampled otherwise, as far as it is the same.
    assert serve(engine, tokens + first.tokens[:13] + [1])[0].cached == 32


def test_a_prompt_shorter_than_a_page_matches_nothing():
    engine, tokens = make(), prompt(4, 15)
    assert [serve(engine, tokens, tokens)[i].cached for i in (0, 1)] == [0, 0]
    assert serve(engine, [*tokens, 1])[0].cached == 0  # a page, and no token left to compute
    assert serve(engine, [*tokens, 1, 2])[0].cached == 16


def test_salts_part_what_seeds_and_temperatures_do_not():
    """PC-02."""
    engine, tokens = make(), prompt(5, 64)
    assert [serve(engine, tokens, salt=salt)[0].cached for salt in (None, "x", "y")] == [0, 0, 0]
    assert [serve(engine, tokens, salt=salt)[0].cached for salt in ("y", None, "x")] == [48, 48, 48]
    warm = SamplingParams(temperature=1.5, seed=7, max_tokens=3, ignore_eos=True)
    assert serve(engine, tokens, params=warm)[0].cached == 48
    for bad in ("", 3):
        with pytest.raises(ValueError, match="cache_salt must be a text that is not empty"):
            Request("r", (1,), GREEDY, cache_salt=bad)


def test_a_salt_that_was_forgotten_is_a_new_one(monkeypatch):
    """The host remembers so many. Catches: a number given to two salts."""
    monkeypatch.setattr("jpaged.runtime.core._NAMESPACES", 1)
    engine, tokens = make(num_pages=13), prompt(6, 40)
    serve(engine, tokens, salt="first")
    for number in range(13):
        serve(engine, [1], salt=f"salt {number}", params=replace(GREEDY, max_tokens=1))
    assert serve(engine, tokens, salt="first")[0].cached == 0
    assert serve(engine, tokens, salt="first")[0].cached == 32
    assert len(engine._namespaces) == 13


def test_replaced_weights_find_nothing_of_the_old_ones():
    """PC-02: the output is that of a cold engine with the new weights, and nothing is compiled."""
    tokens, weights = prompt(7, 64), [{"shift": jnp.array(shift, jnp.int32)} for shift in (0, 3)]
    decoder = SHIFTED
    engine = make(decoder=decoder, params=weights[0])
    first = serve(engine, tokens)[0]
    programs, traces = engine.num_programs, decoder.traces.count
    engine.submit(Request("runs", (1, 2), GREEDY))
    with pytest.raises(RuntimeError, match="while 1 requests have not ended"):
        engine.replace_params(weights[1])
    engine.abort(["runs"])
    engine.replace_params(weights[1])
    assert engine.stats().cached_pages == 0
    second = serve(engine, tokens)[0]
    cold = serve(make(decoder=decoder, params=weights[1]), tokens)[0]
    assert first.tokens != second.tokens == cold.tokens and second.cached == 0
    assert serve(engine, tokens)[0] == Served(second.tokens, 48, FinishReason.LENGTH)
    assert (engine.num_programs, decoder.traces.count) == (programs, traces)
    with pytest.raises(ValueError, match=r"the new weight \['shift'\] is float32\(\), not int32\(\)"):
        engine.replace_params({"shift": jnp.array(0.0, jnp.float32)})
    with pytest.raises(ValueError, match="other"):
        engine.replace_params({"other": jnp.array(0, jnp.int32)})
    assert serve(engine, tokens)[0].tokens == second.tokens


def test_an_old_prefix_survives_its_weights_in_no_way(monkeypatch):
    """The weights' version is part of what is compared, whether or not the cache was cleared."""
    tokens = prompt(7, 64)
    engine = make(decoder=SHIFTED, params={"shift": jnp.array(0, jnp.int32)})
    serve(engine, tokens)
    monkeypatch.setattr(engine, "reset_prefix_cache", lambda: True)
    engine.replace_params({"shift": jnp.array(3, jnp.int32)})
    assert engine.stats().cached_pages > 0
    assert serve(engine, tokens)[0].cached == 0


def test_pages_that_are_found_are_not_the_ones_taken():
    """PC-08: hits are looked up and pinned before pages are taken; the tail of what was used longest ago goes first."""
    engine = make(SMALL)
    one = replace(GREEDY, max_tokens=1)
    a, b, d = (prompt(seed, 65) for seed in (10, 11, 12))
    for tokens in (a, b, d):
        serve(engine, tokens, params=one)
    assert engine.stats().cached_pages == 12
    longer = a + prompt(13, 20)
    assert serve(engine, longer, params=one)[0] == Served(alone(longer, 1), 64, FinishReason.LENGTH)
    # One of b's went, its last; of d none. A lookup counts as use, so these must not be served.
    stats = engine.stats()
    assert (stats.cached_pages, stats.free_pages) == (12, 1)
    # 11 pages: the free one, b's 3, d's 4, and of the 5 of `longer` the last 3.
    serve(engine, prompt(14, 11 * 16), params=one)
    assert serve(engine, a, params=one)[0] == Served(alone(a, 1), 32, FinishReason.LENGTH)
    assert serve(engine, b, params=one)[0].cached == 0


def test_the_tail_of_the_oldest_goes_first():
    engine, one = make(SMALL), replace(GREEDY, max_tokens=1)
    a, b, d = (prompt(seed, 65) for seed in (10, 11, 12))
    for tokens in (a, b, d, prompt(15, 33)):
        serve(engine, tokens, params=one)  # the last needs 3 pages: the free one, and a's last two
    assert serve(engine, a, params=one)[0].cached == 32
    # Which took 3 again: the partial page of the one before, and b's last two.
    assert [serve(engine, tokens, params=one)[0].cached for tokens in (d, b)] == [64, 32]


def test_preempted_requests_that_find_their_prefix_get_no_token_too_many():
    """PR-03: 32 prompts with 64 tokens in common, a pool for a few of them."""
    engine = make(SMALL)
    stem = prompt(20, 64)
    prompts = [stem + prompt(21 + i, 1 + i % 9) for i in range(32)]
    served = serve(engine, *prompts, params=replace(GREEDY, max_tokens=60))
    for tokens, one in zip(prompts, served, strict=True):
        assert one.tokens == alone(tokens, 60)
        assert one.cached == (0 if tokens is prompts[0] else 64)
    stats = engine.stats()
    assert stats.preemptions > 3
    # Each request counts once, however often it came back.
    assert stats.prefix_queries == sum(map(len, prompts))
    assert stats.prefix_hits == 31 * 64 and stats.prefix_hit_rate == 31 * 64 / stats.prefix_queries
    assert "prompt tokens found" in str(stats)


def test_a_common_prefix_multiplies_what_a_pool_holds():
    """Three requests of 9 pages each, 8 of them in common, run at once in 13 pages."""
    engine = make(SMALL)
    stem = prompt(30, 128)
    serve(engine, [*stem, 1], params=replace(GREEDY, max_tokens=1))
    serve(engine, *([*stem, i] for i in range(3)))
    step = max(engine.history, key=lambda step: step.running)
    assert (step.running, step.pages_in_use) == (3, 11)
    assert step.tokens_in_pages <= step.pages_in_use * 16
    assert engine.stats().preemptions == 0
    assert sum(step.prefix_hits for step in engine.history) == 3 * 128
    serve(engine, prompt(31, 3))
    assert engine.history[-1].pages_cached == 8


def test_sharing_is_switched_off_by_a_value():
    """The same tokens, from the same program; nothing is found or kept."""
    stem = prompt(40, 40)
    prompts = [[*stem, i] for i in range(5)]
    found, traces = [], []
    for share in (True, False):
        engine = make(enable_prefix_caching=share)
        engine.warmup()
        served = [serve(engine, *prompts), serve(engine, *prompts)]
        found.append([[one.tokens for one in some] for some in served])
        hits = [one.cached for some in served for one in some]
        assert hits == ([0] + [32] * 9 if share else [0] * 10)
        assert engine.stats().cached_pages > 0 if share else engine.stats().free_pages == 40
        traces.append(READER.traces.count)
    assert found[0] == found[1]
    assert traces[0] == traces[1], "another setting was another program"


def test_resetting_forgets_what_is_cached_and_nothing_that_runs():
    engine, tokens = make(), prompt(50, 64)
    serve(engine, tokens)
    engine.submit(Request("0", tuple(tokens), GREEDY))
    engine.burst()
    assert not engine.reset_prefix_cache()
    while engine.has_work:
        engine.burst()
    assert engine.stats().cached_pages == 4
    programs = engine.num_programs
    assert engine.reset_prefix_cache()
    assert (engine.stats().cached_pages, engine.stats().free_pages) == (0, 40)
    assert [serve(engine, tokens)[0].cached for _ in range(2)] == [0, 48]
    assert engine.num_programs == programs


def test_a_request_that_breaks_leaves_nothing_to_be_found():
    """NU-03: what its pages hold is not finite. It ends in the step that shows, not at the end of its prompt."""
    engine, tokens = make(), prompt(60, 150)
    sick = [*tokens[:70], 31, *tokens[71:]]
    (one,) = serve(engine, sick)
    assert one == Served([], 0, FinishReason.ERROR)
    assert engine.stats().steps == 2 and engine.stats().cached_pages == 4  # those of the first step
    # Who comes with it fails with it; who only begins like it does not.
    both = serve(engine, sick, tokens)
    assert [one.reason for one in both] == [FinishReason.ERROR, FinishReason.LENGTH]
    assert both[1].tokens == alone(tokens)
    assert [one.cached for one in both] == [64, 64]


def test_what_an_aborted_request_computed_is_found():
    """And what it had not is computed by the next, who does not wait for it."""
    engine, tokens = make(), prompt(70, 150)
    for name in ("first", "second"):
        engine.submit(Request(name, tuple(tokens), GREEDY))
    engine.burst()
    engine.abort(["first"])
    assert violations(engine.state) == []
    found = []
    while engine.has_work:
        found += [event.token_id for event in engine.burst()]
        assert violations(engine.state) == []
    assert found == alone(tokens)
    # The first had computed 64 tokens, and the second the rest.
    assert engine.stats().useful_row_steps == 150 + 7


def test_an_engine_that_starts_again_remembers_nothing():
    """What was cached is gone with the pool. Catches: an index that survives what it names."""
    engine, tokens = make(), prompt(80, 64)
    serve(engine, tokens)
    for leaf in jax.tree.leaves(engine.state):
        leaf.delete()
    engine.abort_all()
    assert [serve(engine, tokens)[0] for _ in range(2)] == [
        Served(alone(tokens), cached, FinishReason.LENGTH) for cached in (0, 48)
    ]
