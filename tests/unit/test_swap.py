"""Pages of preempted requests on the host. What comes out of a stub that reads the pool back says whether they are the
same when they are back; the scheduler's side is compared with the oracle in `property/`."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.drive import Ask, Driver
from support.shapes import STUB_MODEL
from support.stubs import HistoryDecoder

from jpaged.config import EngineConfig
from jpaged.policy import shortest_prompt_first
from jpaged.pool import CHUNK_PAGES, SCRATCH_PAGE, KVPool
from jpaged.record.replay import replay
from jpaged.record.saving import Saved
from jpaged.request import FinishReason, Request, SamplingParams
from jpaged.runtime.engine import Engine
from jpaged.step import make_state, violations
from jpaged.viz.timeline import Activity, activities

VOCAB = 32
READER = HistoryDecoder(VOCAB)
MODEL = replace(STUB_MODEL, vocab_size=VOCAB)
CHUNK_BYTES = CHUNK_PAGES * 4 * 2 * 2 * 4  # pages of 4 tokens, a head of 2 in one layer, float32
#: Pages for hardly more than one of the longest, and room for all on the host.
CONFIG = EngineConfig(
    page_size=4, num_pages=13, max_num_seqs=4, max_num_batched_tokens=16, token_budgets=(16,), max_queue=3,
    max_model_len=48, dtype="float32", preemption="swap", swap_space_bytes=14 * CHUNK_BYTES, trace=True,
    enable_prefix_caching=False,
)  # fmt: skip


def mix(count: int, seed: int = 0, priorities: tuple[int, ...] = (0,)) -> list[Request]:
    """Prompts of 1 to 29 tokens, that go on for 5 to 18."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            str(number),
            tuple(rng.integers(0, 30, rng.integers(1, 30)).tolist()),
            SamplingParams(temperature=0, max_tokens=int(rng.integers(5, 19)), ignore_eos=True),
            priority=int(rng.choice(priorities)),
        )
        for number in range(count)
    ]


def alone(request: Request) -> list[int]:
    return READER.continuation(request.prompt_token_ids, request.params.max_tokens or 0)


def drain(engine: Engine, requests: list[Request], most_bursts: int = 500) -> None:
    """Runs the requests, and asserts that each got its tokens."""
    for request in requests:
        engine.submit(request)
    got: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for _ in range(most_bursts):
        for event in engine.burst():
            if event.token_id is not None:
                got[event.request_id].append(event.token_id)
        assert violations(engine.state) == []
        if not engine.has_work:
            break
    assert got == {request.request_id: alone(request) for request in requests}
    assert engine.state.swap is None or bool(engine.state.swap.free.all())
    assert engine.stats().in_use_pages == 0


def until_somebody_is_on_the_host(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        engine.submit(request)
    for _ in range(200):
        engine.burst()
        if np.asarray(engine.state.swap.num_computed_tokens).any():
            return
    raise AssertionError("nobody was swapped out")


def test_pages_come_back_bit_for_bit():
    """PR-05. A value of its own in each place of each page, of keys and of values, in each layer and head: out, the
    pages filled with others, and back to other pages. Catches: keys and values exchanged, another axis, another page;
    NaN and -0.0 that do not stay what they are."""
    config = replace(CONFIG, num_pages=14, swap_space_bytes=1 << 20, trace=False)
    driver = Driver(config, READER, layers=3, kv_heads=2, head_dim=2)
    driver.submit(Ask(1, range(10), 40))
    driver.step()
    driver.submit(Ask(2, range(3), 40, priority=-1))
    driver.step()
    shape = driver.state.pool.k.shape
    values = np.arange(2 * np.prod(shape), dtype=np.float32).reshape(2, *shape)
    values[:, :, :, :, 0, 0], values[:, :, :, :, 1, 1] = np.nan, -0.0
    before = np.asarray(driver.state.slots.page_table[0, :3])
    assert driver.state.slots.num_pages.tolist() == [3, 1, 0, 0]

    # One who stands before it and needs its pages.
    driver.state = replace(driver.state, pool=KVPool(*jnp.array(values)))
    driver.submit(Ask(3, range(40), 48, priority=-1))
    moves = driver.exchange()
    assert np.sum(moves.out_chunk < driver.state.swap.num_chunks) == 1
    assert moves.out_pages[0].tolist() == [*before, *[SCRATCH_PAGE] * 5]
    driver.state = replace(driver.state, pool=jax.tree.map(lambda array: jnp.full_like(array, -1), driver.state.pool))
    driver.step()
    driver.abort(2)
    driver.exchange()
    state = driver.state
    assert violations(state) == [] and not np.asarray(state.swap.num_computed_tokens).any()
    assert state.requests.uid[state.slots.request[1]] == 1 and state.slots.num_pages[1] == 3
    after = np.asarray(state.slots.page_table[1, :3])
    assert not set(before) & set(after), "it came back to where it was"
    for stored, found in zip(values, (state.pool.k, state.pool.v), strict=True):
        assert np.asarray(found)[:, after].tobytes() == stored[:, before].tobytes()


@pytest.mark.parametrize("steps_per_burst", [1, 4])
def test_nothing_is_computed_twice(steps_per_burst):
    """Where the host has room, every preemption is a swap. Catches: an exchange that does not look as far ahead as the
    burst goes, so that a step has to throw away what is computed; a request that returns with less than it had."""
    engine, requests = Engine(READER, (), MODEL, replace(CONFIG, steps_per_burst=steps_per_burst)), mix(14)
    drain(engine, requests)
    stats = engine.stats()
    assert stats.swaps == stats.preemptions > 5
    computed = sum(len(request.prompt_token_ids) + (request.params.max_tokens or 0) - 1 for request in requests)
    assert sum(step.scheduled_tokens for step in engine.history) == stats.useful_row_steps == computed
    assert sum(step.swapped_in for step in engine.history) == sum(step.swapped_out for step in engine.history)
    assert f"{stats.preemptions}, {stats.swaps} of them by swapping" in str(stats)


def test_what_comes_out_does_not_notice():
    """Sampled tokens by seeds that the engine draws, several continuations, penultimate tokens that no stop may be, and
    reasons. Catches: a key, a log-probability or a length that depends on where pages were in the meantime."""
    rng = np.random.default_rng(5)
    params = SamplingParams(temperature=1.0, max_tokens=16, min_tokens=6, stop_token_ids=[3, 4, 5], n=2)
    requests = [Request(str(n), tuple(rng.integers(6, 30, 3 * n + 2).tolist()), params) for n in range(9)]
    told = []
    for changes in ({}, {"preemption": "recompute", "swap_space_bytes": None}):
        engine, events = Engine(READER, (), MODEL, replace(CONFIG, **changes)), {}
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            for event in engine.burst():
                said = event.token_id, event.logprob, event.finish_reason, event.stop_reason
                events.setdefault((event.request_id, event.index), []).append(said)
        assert engine.stats().preemptions > 3 and (engine.stats().swaps > 3) == (not changes)
        told.append(events)
    assert told[0] == told[1] and len(told[0]) == 18
    assert {said[-1][2] for said in told[0].values()} == {FinishReason.STOP, FinishReason.LENGTH}


def test_a_full_host_means_computing_again():
    """Catches: a victim that waits for room there; one whose pages are half there; chunks that are not given back."""
    engine = Engine(READER, (), MODEL, replace(CONFIG, swap_space_bytes=CHUNK_BYTES))
    drain(engine, mix(14))
    assert 0 < engine.stats().swaps < engine.stats().preemptions


@pytest.mark.parametrize(("page_cost", "swaps"), [(0.0, "all"), (3.6, "some"), (5.0, "none")])
def test_auto_takes_what_costs_less(page_cost, swaps):
    """A page of 4 tokens that costs 5 is computed again, one that costs 3.6 is moved if it is full. Catches: costs that
    are compared the wrong way round, or per request and not per page."""
    engine = Engine(READER, (), MODEL, replace(CONFIG, preemption="auto", swap_page_cost=page_cost))
    drain(engine, mix(14))
    stats = engine.stats()
    found = "all" if stats.swaps == stats.preemptions else "some" if stats.swaps else "none"
    assert found == swaps and stats.preemptions > 5


def test_what_others_hold_as_well_is_not_moved_by_auto():
    """Catches: pages that many share counted as if they had to be computed again."""
    config = replace(CONFIG, num_pages=18, enable_prefix_caching=True, preemption="auto", swap_page_cost=2.0)
    driver = Driver(config, READER)
    driver.submit(Ask(1, range(16), 40))
    driver.step()
    driver.step()
    driver.submit(Ask(2, range(16), 40), Ask(3, [*range(20, 29)], 40))
    for _ in range(3):
        driver.step()
    assert int(jnp.sum(driver.state.refcount[1:] > 1)) >= 3
    driver.submit(Ask(4, [*range(30), *range(17)], 48, priority=-1))
    driver.exchange()
    left, kept = np.asarray(driver.state.swap.notes.left), np.asarray(driver.state.swap.notes.to_host)
    fate = {int(uid): bool(on_host) for uid, on_host in zip(left, kept, strict=True) if uid >= 0}
    assert fate[3] is True and fate[2] is False


def test_what_it_costs_is_known_of_the_machine(caplog):
    """Catches: a choice that nobody is told of; a cost that is not of this model and machine."""
    with caplog.at_level("INFO", logger="jpaged"):
        engine = Engine(READER, (), MODEL, replace(CONFIG, preemption="auto", swap_space_bytes=None))
    assert "preemption='auto': on cpu, moving a page of 4 tokens" in caplog.text
    assert engine.config.swap_page_cost and engine.config.swap_space_bytes == 13 * CHUNK_BYTES // CHUNK_PAGES


@pytest.mark.parametrize("victim", ["on the host", "running", "all"])
def test_an_abort_gives_back_what_is_on_the_host(victim):
    """Catches: chunks that nobody gives back; a request that comes back after it was given up."""
    engine, requests = Engine(READER, (), MODEL, CONFIG), mix(8)
    until_somebody_is_on_the_host(engine, requests)
    uids = np.asarray(engine.state.requests.uid)
    on_host = {engine.label(int(uid)) for uid in uids[np.asarray(engine.state.swap.num_computed_tokens) > 0]}
    running = {engine.label(int(uid)) for uid in uids[np.asarray(engine.state.slots.request)]} - on_host
    names = {"on the host": on_host, "running": running, "all": {r.request_id for r in requests}}[victim]
    engine.abort([name for name in names if name])
    assert violations(engine.state) == []
    assert bool(engine.state.swap.free.all()) == (victim != "running")
    left = {request.request_id for request, _ in engine.unfinished()}
    assert not left & names
    for _ in range(300):
        engine.burst()
    assert not engine.has_work and engine.stats().in_use_pages == 0


@pytest.mark.parametrize("steps_per_burst", [1, 4])
@pytest.mark.parametrize("kind", ["recompute", "swap", "auto"])
def test_no_mix_keeps_the_engine_from_going_on(kind, steps_per_burst):
    """Requests as long as the pool allows, that come while others run, always a little more urgent than those. Catches:
    two who send each other away for ever, also where the queue and those who run have orders that contradict each
    other; one who is moved out and in and never computes. In every burst somebody computes, but for those that only
    move, and each of these moves somebody."""
    changes = {"recompute": {"swap_space_bytes": None}, "swap": {}, "auto": {"swap_page_cost": 3.0}}[kind]
    config = replace(CONFIG, preemption=kind, steps_per_burst=steps_per_burst, victim=shortest_prompt_first, **changes)
    engine = Engine(READER, (), MODEL, config)
    rng = np.random.default_rng(1)
    requests = [
        Request(
            str(n), tuple(rng.integers(0, 30, length).tolist()),
            SamplingParams(temperature=0, max_tokens=48 - length, ignore_eos=True), priority=-n,
        )
        for n, length in enumerate(rng.permutation(np.arange(2, 32)).tolist())
    ]  # fmt: skip
    waiting, got, idle = list(requests), {request.request_id: 0 for request in requests}, 0
    most = sum(48 for _ in requests)
    for burst in range(most):
        if waiting and burst % 3 == 0:
            engine.submit(waiting.pop())
        events = engine.burst()
        for event in events:
            got[event.request_id] += event.token_id is not None
        last = list(engine.history)[-steps_per_burst:]
        idle += not any(step.scheduled_tokens for step in last)
        assert violations(engine.state) == []
        if not engine.has_work and not waiting:
            break
    assert got == {request.request_id: request.params.max_tokens for request in requests}
    assert engine.stats().preemptions > 10
    assert idle <= engine.stats().swaps
    assert (engine.stats().swaps > 0) == (kind != "recompute")


def test_a_trace_says_who_went_and_who_came_back():
    """Catches: an exchange that a replay does not do; pages of those who came back that no list names; a request on the
    host that a picture shows as preempted, or whose next token counts as prefill."""
    engine = Engine(READER, (), MODEL, replace(CONFIG, steps_per_burst=2, enable_prefix_caching=True))
    drain(engine, mix(12, seed=3, priorities=(0, 0, -1)))
    trace = engine.trace
    jax.tree.map(np.testing.assert_array_equal, replay(trace, READER, ()), engine.state)
    middle = len(trace) // 2
    state = replay(trace, READER, (), until=middle)
    tables, ended = trace.page_table(middle), np.asarray(trace.record(middle).finish) != 0
    np.testing.assert_array_equal(np.where(ended[:, None], 0, tables), np.asarray(state.slots.named_pages))
    table = activities(trace)
    assert (table == Activity.SWAPPED).any() and not (table == Activity.PREEMPTED).any()
    words = [trace.describe(step) for step in range(1, len(trace) + 1)]
    assert any("is swapped out" in text for text in words) and any("brings back page" in text for text in words)


def test_what_is_on_the_host_is_computed_again_after_a_restore(tmp_path):
    """Also by an engine that has no such pool. Catches: chunks that a state names and no host has."""
    config = replace(CONFIG, trace=False)
    engine, requests = Engine(READER, (), MODEL, config), mix(9)
    until_somebody_is_on_the_host(engine, requests)
    path = engine.save_state(tmp_path / "saved")
    for changes in ({}, {"preemption": "recompute"}):
        saved = Saved(path)
        again = Engine(READER, (), MODEL, saved.config(**changes))
        again.load_state(saved)
        assert violations(again.state) == []
        got = {request.request_id: [e.token_id for e in events] for request, events in again.unfinished()}
        ended = {request.request_id for request in requests} - got.keys()
        while again.has_work:
            for event in again.burst():
                got[event.request_id].append(event.token_id)
        assert got == {r.request_id: alone(r) for r in requests if r.request_id not in ended}


def test_no_program_is_compiled_after_warmup():
    """Catches: moving pages compiled while requests wait."""
    engine = Engine(READER, (), MODEL, CONFIG)
    engine.warmup()
    programs = engine.num_programs
    drain(engine, mix(14))
    assert engine.num_programs == programs and engine.stats().swaps > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preemption": "disk"}, r"preemption must be one of \('recompute', 'swap', 'auto'\), got 'disk'"),
        ({"preemption": "recompute"}, "swap_space_bytes=7168 is of use with preemption='swap' or 'auto' only"),
        ({"swap_page_cost": 2.0}, "swap_page_cost=2.0 is of use with preemption='auto' only; it is 'swap'"),
        ({"preemption": "auto", "swap_page_cost": -1}, "swap_page_cost must be a number of at least 0"),
        ({"preemption": "auto"}, "'auto' swap_page_cost, got 7168 and None"),
        ({"swap_space_bytes": 0}, "swap_space_bytes must be an integer of at least 1 or None, got 0"),
        ({"swap_space_bytes": 100}, "swap_space_bytes 100 hold no 8 pages, which have 256 bytes"),
    ],
)
def test_what_cannot_be_is_refused_in_words(changes, words):
    with pytest.raises(ValueError, match=words):
        make_state(replace(CONFIG, **changes), layers=1, kv_heads=1, head_dim=1)
