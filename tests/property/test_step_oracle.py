"""The traced engine against the scheduler in plain Python, step by step: who runs, what is computed, which pages, what
comes out. A difference of one page or one token is a failure, and hypothesis shrinks the story that led to it.

The suite runs 15 stories of hypothesis for each of three page sizes, each of 8 to 40 operations and the steps to its
end, and about 3,900 steps of random stories; every state is compared and checked. `HYPOTHESIS_PROFILE=search` runs
1,000 stories for each page size, other ones each time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drive import Ask, compiled, jit_abort, jit_exchange, jit_fork, jit_submit, submission
from support.oracle import OracleEngine, OracleRecord
from support.stubs import STUB_SHAPE, HistoryDecoder, Traces

from jpaged.config import EngineConfig
from jpaged.policy import first_come_first_served, longest_prefix_hit_first, shortest_prompt_first
from jpaged.pool import CHUNK_PAGES
from jpaged.runtime.host_pool import HostPool
from jpaged.step import EngineState, Status, evict, make_state, violations
from jpaged.step.sharing import lookup as share
from jpaged.step.sharing.lookup import LOOKUP_PAGES
from jpaged.step.status import NO_REQUEST
from jpaged.step.swap.table import NO_CHUNK

NAN_TOKEN = 31
DECODER = HistoryDecoder(vocab=32, nan_token=NAN_TOKEN)
BUDGETS = {1: (5, 24), 4: (2, 5, 24), 16: (5, 24)}  # by page size
SUBMIT, BURST, BURST_BUDGET = 2, 3, 5
#: Of stories, by page size, in which all that is rare happens.
SEEDS = {1: 100, 4: 401, 16: 1600}


# Prompts begin alike: with one of these, cut somewhere. Two differ at once, and two later.
STEM = np.random.default_rng(0).integers(0, NAN_TOKEN, 200).tolist()
STEMS = (STEM, STEM[:40] + STEM[80:], STEM[1:])


def tight(page_size: int, max_model_len: int, num_pages: int) -> EngineConfig:
    """Four slots, and pages for hardly more than one of the longest requests: preemption is the rule."""
    return EngineConfig(
        page_size=page_size, num_pages=num_pages, max_num_seqs=4, max_queue=3,
        max_num_batched_tokens=24, max_model_len=max_model_len,
    )  # fmt: skip


CONFIGS = {1: tight(1, 24, 36), 4: tight(4, 40, 15), 16: tight(16, 120, 9)}
TOKEN_BYTES = 2 * 4 * STUB_SHAPE["layers"] * STUB_SHAPE["kv_heads"] * STUB_SHAPE["head_dim"]
#: Chunks of the host's pool: not always enough.
NUM_CHUNKS = {1: 4, 4: 3, 16: 2}
#: With that pool, and no request that would rather compute again; by value, another `page_cost` can be tried.
SWAPPING = {
    page_size: replace(
        config, preemption="swap",
        swap_space_bytes=NUM_CHUNKS[page_size] * CHUNK_PAGES * page_size * TOKEN_BYTES,
    )
    for page_size, config in CONFIGS.items()
}  # fmt: skip


@lru_cache
def fresh(config: EngineConfig) -> EngineState:
    return jax.device_put(make_state(config, **STUB_SHAPE), jax.devices()[0])


@lru_cache
def host_pool(config: EngineConfig) -> HostPool:
    state = fresh(config)
    assert state.swap is not None
    return HostPool(state.pool, state.swap.num_chunks)


jit_evict = jax.jit(evict)


class Pair:
    """The engine and the oracle, told the same things."""

    def __init__(
        self, page_size: int, decoder: HistoryDecoder = DECODER, *, configs=CONFIGS, share=True, page_cost=0.0,
        lookup_pages=LOOKUP_PAGES, **policies,
    ):  # fmt: skip
        self.sizes, self.decoder = configs[page_size], decoder
        self.state = jax.tree.map(jnp.copy, fresh(self.sizes))
        # Not another engine: the switches are values.
        self.state = replace(self.state, prefixes=replace(self.state.prefixes, enabled=jnp.array(share)), **policies)
        self.config, num_chunks = replace(self.sizes, enable_prefix_caching=share, **policies), 0
        if self.state.swap is not None:
            num_chunks = self.state.swap.num_chunks
            self.config = replace(self.config, preemption="auto", swap_page_cost=page_cost)
            self.state = replace(self.state, swap=replace(self.state.swap, page_cost=jnp.float32(page_cost)))
        # All arrays are bound to the device, as those that a step returns: else its second call is another program.
        self.state = jax.device_put(self.state, jax.devices()[0])
        self.oracle = OracleEngine(self.config, decoder, lookup_pages, num_chunks=num_chunks)
        self.next_uid = 1

    def submit(self, *requests: dict) -> None:
        requests = requests[: self.oracle.free_rows]
        asks = [Ask(uid=self.next_uid + i, **request) for i, request in enumerate(requests)]
        self.next_uid += len(asks)
        self.state = jit_submit(self.state, submission(self.config, asks, SUBMIT))
        for ask in asks:
            self.oracle.submit(
                ask.uid, ask.prompt, max_len=ask.max_len, min_len=ask.min_len, stop_ids=ask.stop_ids,
                namespace=ask.namespace, priority=ask.priority, parent=ask.parent,
            )  # fmt: skip
        self.compare()

    def fork(self, uid: int) -> None:
        if self.oracle.free_rows:
            one = (np.array([value], np.int32) for value in (uid, self.next_uid))
            self.state = jit_fork(self.state, *one, np.zeros(1, np.uint32))
            self.oracle.fork(uid, self.next_uid)
            self.next_uid += 1
            self.compare()

    def abort(self, uid: int) -> None:
        self.state = jit_abort(self.state, jnp.array([uid, -1], jnp.int32))
        self.oracle.abort(uid)
        self.compare()

    def exchange(self, ahead: int) -> None:
        self.state, moves = jit_exchange(self.state, ahead)
        pool = host_pool(self.sizes).move(self.state.pool, jax.device_get(moves))
        self.state = replace(self.state, pool=pool)
        self.oracle.exchange(ahead)
        self.compare()

    def step(self, budget: int) -> None:
        self.state = compiled(self.decoder, budget)(None, self.state)
        record = self.oracle.step(budget)
        self.compare_record(self.state.record, record)
        self.compare()

    def burst(self, budget: int = BURST_BUDGET) -> None:
        """`run` is that many steps, then an eviction."""
        self.state, records, wanted = compiled(self.decoder, budget, BURST)(None, self.state)
        for index in range(BURST):
            self.compare_record(jax.tree.map(lambda a, i=index: a[i], records), self.oracle.step(budget))
        self.oracle.evict()
        self.compare()
        assert int(wanted) == self.oracle.demand()

    def compare_record(self, traced, expected: OracleRecord) -> None:
        traced = jax.tree.map(np.asarray, traced)
        for name in ("uid", "scheduled", "sampled", "finish", "cached_tokens"):
            assert getattr(traced, name).tolist() == getattr(expected, name), name
        sampled = np.asarray(expected.sampled)
        assert traced.token[sampled].tolist() == np.asarray(expected.token)[sampled].tolist()
        assert np.isfinite(traced.logprob[sampled]).all()
        left = {
            int(slot): (int(traced.left[slot]), bool(traced.to_host[slot]))
            for slot in np.flatnonzero(traced.left != NO_REQUEST)
        }
        assert left == expected.left
        for name in (
            "running", "waiting", "admitted", "preempted", "discarded", "restored", "recovered", "prefix_queries",
            "prefix_hits", "pages_in_use", "pages_cached", "tokens_stored",
        ):  # fmt: skip
            assert int(getattr(traced, name)) == getattr(expected, name), name

    def compare(self) -> None:
        # Fetched once, for the checker too; but for the pool, of which it wants the sizes.
        state, oracle = jax.device_get(replace(self.state, pool=self.state.refcount)), self.oracle
        assert violations(replace(state, pool=self.state.pool)) == []
        for index, slot in enumerate(oracle.slots):
            assert bool(state.slots.occupied[index]) == (slot is not None)
            pages = [] if slot is None else slot.pages
            assert state.slots.page_table[index, : len(pages)].tolist() == pages
            assert state.slots.num_pages[index] == len(pages)
            assert state.slots.num_computed_tokens[index] == (0 if slot is None else slot.num_computed_tokens)
            assert state.slots.entered[index] == (0 if slot is None else slot.entered)
            if slot is not None:
                assert oracle.rows[state.slots.request[index]] is slot.request
        assert set(np.flatnonzero(state.refcount == 0).tolist()) == set(oracle.available)
        assert set(np.flatnonzero(state.prefixes.cached).tolist()) == set(oracle.found.values())
        available = state.refcount[1:] == 0
        assert int(available.sum()) + len(oracle.in_use) == self.config.num_pages
        for row, request in enumerate(oracle.rows):
            expected = Status.FREE if request is None else request.status
            assert state.requests.status[row] == expected
            if request is not None:
                known = len(request.tokens)
                assert state.requests.uid[row] == request.uid
                assert state.requests.arrival[row] == request.arrival
                assert state.requests.num_tokens[row] == known
                assert state.requests.cached_tokens[row] == request.cached_tokens
                parent = state.requests.parent[row]
                assert (parent == NO_REQUEST) == (request.parent is None)
                assert request.parent is None or oracle.rows[parent] is request.parent
                assert state.requests.tokens[row, :known].tolist() == request.tokens
                if state.swap is not None:
                    assert state.swap.num_computed_tokens[row] == request.stored
                    assert [chunk for chunk in state.swap.table[row].tolist() if chunk != NO_CHUNK] == request.chunks
        for name in (
            "submitted", "steps", "computed_tokens", "padded_tokens", "preemptions", "prefix_queries", "prefix_hits"
        ):  # fmt: skip
            assert int(getattr(state.counters, name)) == getattr(oracle, name), name


tokens = st.integers(0, NAN_TOKEN - 1)


@st.composite
def requests(draw, longest: int) -> dict:
    prompt = draw(st.lists(tokens, min_size=1, max_size=draw(st.sampled_from((3, 17, longest - 1)))))
    if draw(st.booleans()):
        stem = draw(st.sampled_from(STEMS))[: draw(st.integers(1, longest - 1))]
        prompt = (stem + prompt)[: draw(st.integers(len(stem), longest - 1))]
    if draw(st.integers(0, 19)) == 0:
        prompt[draw(st.integers(0, len(prompt) - 1))] = NAN_TOKEN
    max_len = draw(st.integers(len(prompt) + 1, longest))
    return {
        "prompt": prompt,
        "max_len": max_len,
        "min_len": draw(st.one_of(st.just(0), st.integers(len(prompt), max_len))),
        "stop_ids": draw(st.lists(tokens, max_size=3, unique=True)),
        "namespace": draw(st.sampled_from((0, 0, 0, 5))),
        "priority": draw(st.sampled_from((0, 0, 0, -2, 3))),
    }


def stories(page_size: int):
    longest = CONFIGS[page_size].max_model_len
    step = st.tuples(st.just("step"), st.sampled_from(BUDGETS[page_size]))
    operation = st.one_of(
        st.tuples(st.just("submit"), st.lists(requests(longest), min_size=1, max_size=SUBMIT)),
        step,
        step,
        st.tuples(st.just("burst"), st.just(BURST_BUDGET)),
        st.tuples(st.just("abort"), st.integers(1, 8)),
        st.tuples(st.just("fork"), st.integers(1, 8)),
        st.tuples(st.just("continuations"), requests(longest)),
        st.tuples(st.just("exchange"), st.sampled_from((1, 3))),
    )
    return st.lists(operation, min_size=8, max_size=40)


def apply(pair: Pair, operation: tuple) -> None:
    kind, value = operation
    if kind == "submit":
        pair.submit(*value)
    elif kind == "continuations":
        pair.submit(value, value | {"parent": pair.next_uid})
    elif kind in ("abort", "fork"):
        getattr(pair, kind)(max(pair.next_uid - value, 0))
    else:
        getattr(pair, kind)(value)


@pytest.mark.parametrize("page_size", CONFIGS)
@given(data=st.data())
def test_engine_and_oracle_agree_at_every_step(page_size, data):
    """Catches: a page lost, doubled or taken in another order; a request starved, overtaken or preempted out of turn;
    a token from another's page; a stop, minimum or length rule off by one; a count that is wrong."""
    pair = Pair(page_size, configs=SWAPPING, page_cost=data.draw(st.sampled_from((0.0, 0.6, 100.0)), label="cost"))
    for operation in data.draw(stories(page_size), label="story"):
        apply(pair, operation)
    for _ in range(1000):
        if not any(pair.oracle.rows):
            return
        pair.exchange(1)
        pair.step(pair.config.max_num_batched_tokens)
    raise AssertionError("requests never end")


@dataclass
class Dice:
    """Random requests without hypothesis: a long story needs no shrinking to begin with."""

    rng: np.random.Generator
    longest: int
    priorities: bool

    def request(self) -> dict:
        length = self.rng.integers(1, self.rng.choice((6, 6, 6, self.longest)))
        prompt = self.rng.integers(0, NAN_TOKEN, length).tolist()
        if self.rng.random() < 0.7:
            stem = STEMS[self.rng.integers(len(STEMS))][: self.rng.integers(1, self.longest // self.rng.integers(1, 4))]
            prompt = (stem + prompt)[: self.longest - 1]
        if self.rng.random() < 0.05:
            prompt[-1] = NAN_TOKEN
        if self.rng.random() > 0.5:
            max_len = min(len(prompt) + int(self.rng.integers(1, 8)), self.longest)
        else:
            max_len = int(self.rng.integers(max(len(prompt) + 1, self.longest // 2), self.longest + 1))
        stop_ids = self.rng.integers(0, NAN_TOKEN, self.rng.choice((0, 0, 0, 2))).tolist()
        return {
            "prompt": prompt,
            "max_len": max_len,
            "min_len": int(self.rng.integers(0, self.longest // 2)),
            "stop_ids": stop_ids,
            "namespace": int(self.rng.choice((0, 0, 0, 5))),
            "priority": int(self.rng.choice((0, 0, 0, -2, 3))) if self.priorities else 0,
        }


def random_story(
    pair: Pair, steps: int, budgets: tuple[int, ...], *, bursts=True, priorities=False, swaps=False, seed=None
) -> None:
    """Submissions, often of one prompt twice, aborts, bursts and steps at random; then steps until nobody is left."""
    page_size = pair.config.page_size
    dice = Dice(np.random.default_rng(seed or SEEDS[page_size]), CONFIGS[page_size].max_model_len, priorities)
    while pair.oracle.steps < steps:
        throw = dice.rng.random()
        if throw < 0.3 and pair.oracle.free_rows:
            one, other = dice.request(), dice.request()
            if throw < 0.2:
                other = other | {name: one[name] for name in ("prompt", "namespace", "max_len")}
            if throw < 0.07:
                other |= {"parent": pair.next_uid}
            pair.submit(one, other)
            if throw < 0.05:
                pair.submit(other, other)
        elif throw < 0.31:
            pair.fork(int(dice.rng.integers(max(pair.next_uid - 8, 0), pair.next_uid + 1)))
        elif throw < 0.33:
            pair.abort(int(dice.rng.integers(max(pair.next_uid - 8, 0), pair.next_uid + 1)))
        elif throw < 0.4 and bursts:
            pair.burst()
        else:
            if swaps and throw > 0.5:
                pair.exchange(int(dice.rng.choice((1, 3))))
            pair.step(int(dice.rng.choice(budgets)))
    for _ in range(1000):
        if not any(pair.oracle.rows):
            break
        if swaps:
            pair.exchange(1)
        pair.step(budgets[-1])
    assert not any(pair.oracle.rows), "requests never end"
    assert int(pair.state.available_pages) == pair.config.num_pages


#: What a story must have at least once, for what it proves.
SHARED = ("evicted", "recovered", "attached", "waited", "given back", "filled twice in a step", "forked", "inherited")


def test_500_random_steps_lose_no_page():
    """PC-06: two code paths that free one page, or a page nobody frees, show up within 500 steps of everything. A state
    without a pool on the host; pages of 1 and 16 tokens are in the next test."""
    pair = Pair(4)
    random_story(pair, 500, (5, 24))
    assert pair.oracle.preemptions > 5, "the pool was not tight enough"
    for event in (*SHARED, "copied"):
        assert pair.oracle.seen[event] > 0, f"the story has no {event!r}"


@pytest.mark.parametrize("page_size", CONFIGS)
def test_500_random_steps_with_a_pool_on_the_host(page_size):
    """Catches: a chunk lost, or given to two; a request that comes in before its pages, or computes them again; one
    that overtakes who waits for the host; pages restored where others are found."""
    pair = Pair(page_size, configs=SWAPPING, page_cost={1: 0.0, 4: 3.0, 16: 0.0}[page_size])
    random_story(pair, 500, BUDGETS[page_size], priorities=True, swaps=True, seed={1: 100, 4: 18, 16: 401}[page_size])
    copied = ["copied"] if page_size > 1 else []
    for event in ("kept on the host", "brought back", "too many for the host", "made way", *SHARED, *copied):
        assert pair.oracle.seen[event] > 0, f"the story has no {event!r}"
    assert (pair.oracle.seen["cheaper to compute"] > 0) == (page_size == 4)
    assert pair.state.swap is not None and bool(pair.state.swap.free.all())


@pytest.mark.parametrize(
    ("policies", "seed"),
    [
        ({}, 401),
        ({"admission": shortest_prompt_first, "victim": shortest_prompt_first}, 401),
        ({"admission": longest_prefix_hit_first}, 2),
        ({"admission": first_come_first_served, "victim": first_come_first_served}, 4),
        ({"victim": shortest_prompt_first}, 401),
    ],
    ids=["default", "shortest", "hits", "first-come", "crossed"],
)
def test_under_any_policy(policies, seed):
    """Catches: an order that the arithmetic of pages does not follow; a request that waits for one behind it; one that
    is sent back for one that does not come in, or that stands no higher."""
    pair = Pair(4, **policies)
    random_story(pair, 300, (24,), priorities=True, bursts=False, seed=seed)  # one program each
    assert pair.oracle.preemptions > 5
    assert pair.oracle.seen["made way"] > 2
    if policies == {"victim": shortest_prompt_first}:
        assert pair.oracle.seen["would come in again"] > 3


def test_nothing_is_shared_where_that_is_switched_off():
    """By the same program. Catches: a page found, kept or waited for although nobody may."""
    pair = Pair(4, configs=SWAPPING, share=False)
    random_story(pair, 200, BUDGETS[4], swaps=True)
    assert pair.oracle.prefix_hits == 0 < pair.oracle.prefix_queries
    assert int(pair.state.free_pages) == pair.config.num_pages


def test_who_does_not_fit_in_a_lookup_is_looked_up_later(monkeypatch):
    """A lookup that holds one of the longest prompts: requests come in one after the other, or find less."""
    monkeypatch.setattr(share, "LOOKUP_PAGES", 1)
    pair = Pair(4, replace(DECODER, traces=Traces()), lookup_pages=1)
    random_story(pair, 200, (24,), bursts=False, seed=1600)
    assert pair.oracle.seen["left out of a lookup"] > 5


@given(story=st.lists(requests(CONFIGS[4].max_model_len), min_size=1, max_size=6))
def test_a_burst_is_its_steps(story):
    """Catches: state that a burst carries otherwise than a caller of `step` would. Every array must be equal."""
    ends = []
    for steps in (1, BURST):
        state = jax.tree.map(jnp.copy, fresh(CONFIGS[4]))
        for index, request in enumerate(story):
            state = jit_submit(state, submission(CONFIGS[4], [Ask(uid=index + 1, **request)], SUBMIT))
        records = []
        for _ in range(2 * BURST // steps):
            if steps == 1:
                state = compiled(DECODER, BURST_BUDGET)(None, state)
                records.append(jax.tree.map(lambda a: np.asarray(a)[None], state.record))
            else:
                state, record, _ = compiled(DECODER, BURST_BUDGET, BURST)(None, state)
                records.append(jax.tree.map(np.asarray, record))
        if steps == 1:  # a burst ends with an eviction, and so does the comparison
            state = jit_evict(state)
        ends.append((jax.tree.map(np.asarray, state), jax.tree.map(lambda *a: np.concatenate(a), *records)))
    jax.tree.map(np.testing.assert_array_equal, *ends)
