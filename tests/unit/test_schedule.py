"""Who gets how many tokens, who comes in, who must go, and how it is packed: small pictures, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.drive import Ask, jit_submit, submission
from support.stubs import STUB_SHAPE

from jpaged.config import EngineConfig
from jpaged.pool import SCRATCH_PAGE
from jpaged.step import EngineState, Slots, Status, make_state
from jpaged.step import demand as step_demand
from jpaged.step.scheduling import admit as _admit
from jpaged.step.scheduling import evict as _evict
from jpaged.step.scheduling import grant as _grant
from jpaged.step.scheduling import pack as _pack
from jpaged.step.scheduling.grant import within_pages

CONFIG = EngineConfig(
    page_size=4, num_pages=12, max_num_seqs=4, max_queue=4, max_num_batched_tokens=64, max_model_len=40
)
#: One program each and budget, in place of one for each operation in them.
admit, preempt, grant, schedule, pack = (
    jax.jit(function, static_argnames="budget")
    for function in (_admit.admit, _evict.preempt, _grant.grant, _grant.schedule, _pack.pack)
)
demand = jax.jit(step_demand)


def picture(*slots: tuple[int, int, int], waiting: tuple[int, ...] = (), num_pages: int = 12) -> EngineState:
    """A state whose slots hold `(arrival, known, computed)`, pages given in order, and whose queue has prompts of
    `waiting` tokens. `(-1, 0, 0)` is an empty slot. Of its 12 pages those past `num_pages` are held, by no
    slot."""
    state = make_state(CONFIG, **STUB_SHAPE)
    taken = [s for s in slots if s[0] >= 0]
    state = jit_submit(state, submission(CONFIG, [Ask(10 + a, [a] * n, 40) for a, n, _ in taken], size=4))
    first = max((a for a, _, _ in taken), default=-1) + 1
    row = jnp.arange(len(taken))
    requests = replace(
        state.requests,
        arrival=state.requests.arrival.at[row].set(jnp.array([a for a, _, _ in taken], jnp.int32)),
        status=state.requests.status.at[row].set(jnp.int32(Status.RUNNING)),
    )
    counters = replace(state.counters, submitted=jnp.uint32(first))
    table, held, page = np.full((4, CONFIG.max_pages_per_seq), SCRATCH_PAGE, np.int32), np.zeros(4, np.int32), 1
    refcount, computed = np.zeros(1 + 12, np.int32), np.zeros(4, np.int32)
    holders = np.zeros((1, 1 + 12), np.uint32)
    occupied, request = np.zeros(4, bool), np.zeros(4, np.int32)
    refcount[SCRATCH_PAGE] = 1
    refcount[num_pages + 1 :] = 1
    for slot, (arrival, _, done) in enumerate(slots):
        if arrival < 0:
            continue
        occupied[slot], request[slot], computed[slot] = True, taken.index(slots[slot]), done
        held[slot] = -(-done // 4)
        for column in range(held[slot]):
            table[slot, column] = page
            refcount[page], holders[0, page] = 1, 1 << slot
            page += 1
    state = replace(
        state, requests=requests, counters=counters, refcount=jnp.asarray(refcount), holders=jnp.asarray(holders),
        slots=Slots(*(jnp.asarray(a) for a in (occupied, request, computed, computed // 4, held, table))),
    )  # fmt: skip
    if waiting:
        asks = [Ask(100 + i, [50 + i] * n, 40) for i, n in enumerate(waiting)]
        state = jit_submit(state, submission(CONFIG, asks, size=4))
    return state


EMPTY = (-1, 0, 0)
OLD_PROMPT = ((0, 30, 10), (1, 9, 8), EMPTY, (2, 6, 5))  # the oldest computes a long prompt, two others decode


@pytest.mark.parametrize(
    ("slots", "budget", "tokens"),
    [
        (OLD_PROMPT, 64, [20, 1, 0, 1]),
        (OLD_PROMPT, 10, [8, 1, 0, 1]),  # a long prompt does not stall the others
        (OLD_PROMPT, 3, [1, 1, 0, 1]),
        (OLD_PROMPT, 2, [1, 1, 0, 0]),  # too small for all: the oldest go on
        (OLD_PROMPT, 1, [1, 0, 0, 0]),
        (((2, 30, 10), (1, 20, 5), (0, 9, 8), EMPTY), 20, [4, 15, 1, 0]),
        (((0, 9, 9), (1, 9, 8), EMPTY, EMPTY), 5, [0, 1, 0, 0]),  # nothing wanted, nothing given
        ((EMPTY,) * 4, 5, [0, 0, 0, 0]),
    ],
)
def test_one_token_each_and_then_the_oldest_first(slots, budget, tokens):
    """Catches: decoding that waits behind a prompt, a budget exceeded, age taken for slot order."""
    assert grant(picture(*slots), budget=budget).tolist() == tokens


def test_scheduling_takes_the_lowest_free_pages_slot_by_slot():
    state = picture((1, 9, 8), (0, 12, 3), EMPTY, EMPTY)  # pages 1, 2 and 3 are held
    state, tokens = schedule(state, budget=64)
    assert tokens.tolist() == [1, 9, 0, 0]
    assert state.slots.num_pages.tolist() == [3, 3, 0, 0]
    assert state.slots.page_table[:2, :4].tolist() == [[1, 2, 4, 0], [3, 5, 6, 0]]
    assert int(state.available_pages) == 6


@pytest.mark.parametrize(
    ("budget", "waiting", "num_pages", "admitted", "why"),
    [
        (64, (5, 5), 12, 2, "there is room"),
        (64, (5, 5, 5, 5), 12, 2, "two slots are free"),
        (3, (5, 5), 12, 1, "tokens: 2 are wanted already; the first takes what is left, the second finds none"),
        (2, (5, 5), 12, 0, "the budget is spent"),
        (8, (5, 5), 12, 2, "5 + 2 of 8 leaves one for the second"),
        # 5 pages are held or needed by those who run; the head needs its own 2 and one for each of those 2
        (64, (5, 1), 8, 0, "8 - 4 free, less 1 that a running one needs now: 3 < 2 + 2, and nobody overtakes"),
        (64, (5, 1), 9, 1, "4 >= 2 + 2; the next would need 2 + 3 + 1"),
        (64, (5, 1), 11, 2, "6 >= 2 + 3 + 1"),
    ],
)
def test_who_comes_in(budget, waiting, num_pages, admitted, why):
    """The page arithmetic of `admit`. Catches: an admission that takes pages spoken for, a queue that is overtaken."""
    state = picture((0, 9, 8), EMPTY, (1, 7, 6), EMPTY, waiting=waiting, num_pages=num_pages)
    after, _ = admit(state, budget=budget)
    assert int(after.record.admitted) == admitted, why
    assert after.slots.occupied.tolist() == [True, admitted > 0, True, admitted > 1]
    rows = [2, 3][:admitted]
    assert after.slots.request[jnp.array([1, 3])[:admitted]].tolist() == rows
    assert (after.requests.status[2 : 2 + len(waiting)] == Status.RUNNING).tolist() == [
        i < admitted for i in range(len(waiting))
    ]


def test_the_head_of_the_queue_comes_into_an_empty_engine_whatever_its_size():
    """Progress: a request as large as the pool is admitted once nobody runs."""
    state = picture(EMPTY, EMPTY, EMPTY, EMPTY, waiting=(40,), num_pages=10)
    assert int(admit(state, budget=1)[0].record.admitted) == 1


@pytest.mark.parametrize(
    ("slots", "num_pages", "victims"),
    [
        (((0, 9, 8), (1, 9, 8), (2, 9, 8), (3, 9, 8)), 12, []),  # 4 pages are needed and there
        (((0, 9, 8), (1, 9, 8), (2, 9, 8), (3, 9, 8)), 11, [3]),  # its two pages serve the others
        (((0, 9, 8), (1, 9, 8), (2, 9, 8), (3, 9, 8)), 8, [2, 3]),  # none free: two go, two go on
        (((3, 9, 8), (1, 9, 8), (2, 9, 8), (0, 9, 8)), 11, [0]),  # by age, not by slot
        (((0, 9, 8), (1, 8, 7), (2, 8, 7), (3, 8, 7)), 8, [3]),  # one page is needed
        (((0, 8, 7), (1, 8, 7), (2, 8, 7), (3, 8, 7)), 8, []),  # none is needed
        (((0, 33, 32), (1, 5, 4), EMPTY, EMPTY), 9, [1]),
    ],
)
def test_the_youngest_make_room(slots, num_pages, victims):
    """Catches: the oldest preempted, more than needed preempted, pages that stay behind."""
    state = picture(*slots, num_pages=num_pages)
    free = int(state.available_pages)
    after = preempt(state, budget=64)
    gone = [slot for slot in range(4) if state.slots.occupied[slot] and not after.slots.occupied[slot]]
    assert gone == victims
    assert int(after.record.preempted) == len(victims) == int(after.counters.preemptions)
    assert int(after.record.discarded) == sum(slots[v][2] for v in victims)
    assert int(after.available_pages) == free + sum(-(-slots[v][2] // 4) for v in victims)
    for victim in victims:
        row = state.slots.request[victim]
        assert after.requests.status[row] == Status.WAITING
        assert after.requests.arrival[row] == state.requests.arrival[row]  # it keeps its place
        assert after.slots.num_computed_tokens[victim] == 0 and after.slots.num_pages[victim] == 0


def shared(state: EngineState, *pages: tuple[int, int, int]) -> EngineState:
    """`state` with `(slot, column, page)` in its tables in place of what was there."""
    table, refcount, holders = state.slots.page_table, state.refcount, state.holders
    for slot, column, page in pages:
        refcount = refcount.at[table[slot, column]].add(-1).at[page].add(1)
        holders = holders.at[0, table[slot, column]].add(jnp.uint32(2**32 - (1 << slot)))
        holders = holders.at[0, page].add(jnp.uint32(1 << slot))
        table = table.at[slot, column].set(page)
    return replace(state, refcount=refcount, holders=holders, slots=replace(state.slots, page_table=table))


@pytest.mark.parametrize(
    ("sharing", "victims", "why"),
    [
        ((), [3], "the youngest gives its 2 pages"),
        (((3, 0, 1), (3, 1, 2)), [2, 3], "its pages are the oldest's too: it gives none, and the next gives 2"),
        (((3, 0, 5), (3, 1, 6)), [2, 3], "only with the next do 2 come back"),
        (((3, 0, 5),), [3], "one of its 2 comes back, and that is enough"),
    ],
)
def test_a_page_comes_back_with_the_last_who_holds_it(sharing, victims, why):
    """Catches: a shared page counted for each, so that too few make room. Slots hold pages 1 and 2, 3 and 4, ..."""
    state = shared(picture((0, 9, 8), (1, 8, 7), (2, 8, 7), (3, 8, 7), num_pages=12), *sharing)
    nobodys = state.refcount == 0
    state = replace(state, refcount=jnp.where(nobodys, 1, state.refcount))  # somebody holds all the rest
    after = preempt(state, budget=64)
    assert [s for s in range(4) if not after.slots.occupied[s]] == victims, why
    assert int(after.available_pages) >= 1


def test_tokens_are_cut_where_their_pages_are_not_there():
    """Budget that a preempted request leaves to an older one could be more than the pages that came back. Catches: a
    page in use that is handed out."""
    state = picture((0, 40, 4), (1, 40, 4), EMPTY, EMPTY, num_pages=12)
    state = replace(state, refcount=state.refcount.at[6:].set(1))  # 3 are left
    tokens = jnp.array([9, 8, 0, 0], jnp.int32)
    assert within_pages(state, tokens).tolist() == [9, 0, 0, 0]
    assert within_pages(state, tokens // 2).tolist() == [4, 4, 0, 0]
    assert within_pages(picture((1, 40, 4), (0, 40, 2), EMPTY, EMPTY), tokens).tolist() == [9, 8, 0, 0]
    after, tokens = schedule(state, budget=17)
    assert tokens.tolist() == [12, 0, 0, 0] and int(after.refcount.max()) == 1


def test_packing_leaves_no_gap_and_padding_touches_nobody():
    """Catches: padding with a real row's page, position or token; a row's tokens out of place."""
    state = picture((0, 12, 3), EMPTY, (1, 9, 8), (2, 6, 6))
    state, tokens = schedule(state, budget=16)
    batch, slot_of_row = pack(state, tokens, budget=16)
    assert slot_of_row.tolist() == [0, 2, 4, 4]
    assert batch.query_start.tolist() == [0, 9, 10, 10, 10]
    assert batch.token_row.tolist() == [0] * 9 + [1] + [4] * 6
    assert batch.positions.tolist() == [*range(3, 12), 8, *[0] * 6]
    assert batch.token_ids.tolist() == [0] * 9 + [1] + [0] * 6
    assert batch.kv_len.tolist() == [12, 9, 0, 0]
    assert batch.logit_index.tolist()[:2] == [8, 9]
    assert batch.page_table[0, :3].tolist() == state.slots.page_table[0, :3].tolist()
    assert (batch.page_table[2:] == SCRATCH_PAGE).all()


def test_a_budget_below_the_slots_has_that_many_rows():
    state = picture((0, 9, 8), (1, 9, 8), (2, 9, 8), (3, 9, 8))
    state, tokens = schedule(state, budget=3)
    batch, slot_of_row = pack(state, tokens, budget=3)
    assert slot_of_row.tolist() == [0, 1, 2] and batch.num_rows == 3
    assert batch.token_row.tolist() == [0, 1, 2]


def test_demand_counts_those_who_would_come_in():
    """What the host picks the next program by: too small would cost steps, too large padding."""
    assert int(demand(picture((0, 30, 10), (1, 9, 8), EMPTY, EMPTY))) == 21
    assert int(demand(picture((0, 9, 8), EMPTY, EMPTY, EMPTY, waiting=(5, 7), num_pages=12))) == 13
    assert int(demand(picture(EMPTY, EMPTY, EMPTY, EMPTY))) == 0
