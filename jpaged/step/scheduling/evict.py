"""Pages and slots back from requests that ended, and from those that must make room."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jpaged.step.pages import bits_of, from_column, give_back, leading
from jpaged.step.scheduling.grant import grant, pages_needed, wanted
from jpaged.step.scheduling.order import head_of_queue, running_order, standing
from jpaged.step.sharing.fork import adopt, heirs, heritage, parent_slots, ready
from jpaged.step.state import EngineState
from jpaged.step.status import NO_REQUEST, Status
from jpaged.step.swap.table import Notes


def hand_on(state: EngineState, which: jax.Array, heir: jax.Array | None = None) -> EngineState:
    """Gives the slots of `which` `[S] bool` to the requests `heir` `[S]`, with the pages of the tokens that are theirs
    as well; to none where that is R, or there are no heirs. The other pages are given back. Those that can be found
    stay cached."""
    slots, requests, page_size = state.slots, state.requests, state.pool.page_size
    none = requests.num_rows
    inherits, kept, row = jnp.zeros_like(which), jnp.zeros_like(slots.request), jnp.full_like(slots.request, none)
    if heir is not None:
        inherits, kept = which & (heir < none), heritage(state, heir)
        row = jnp.where(inherits, heir, none)
    computed = jnp.where(which, jnp.where(inherits, kept, 0), slots.num_computed_tokens)
    num_pages = jnp.where(which, -(-computed // page_size), slots.num_pages)
    dropped = bits_of(which & ~inherits)[:, None]
    if heir is not None:
        columns = slots.page_table.shape[1]
        dropped |= from_column(jnp.where(inherits, num_pages, columns), state.prefixes.depth, columns)
    holders, refcount = give_back(state.holders, state.refcount, dropped)
    return replace(
        state,
        holders=holders,
        refcount=refcount,
        slots=replace(
            slots,
            occupied=jnp.where(which, inherits, slots.occupied),
            request=jnp.where(inherits, row, slots.request),
            num_computed_tokens=computed,
            entered=jnp.minimum(slots.entered, computed // page_size),
            num_pages=num_pages,
        ),
        requests=replace(requests, status=requests.status.at[row].set(Status.RUNNING, mode="drop")),
    )


def evict(state: EngineState) -> EngineState:
    """Clears out what has ended: FINISHED and ABORTED requests leave their slots, to those forks of theirs that have
    not begun, if there are any; and their rows become FREE."""
    requests, slots = state.requests, state.slots
    over = (requests.status == Status.FINISHED) | (requests.status == Status.ABORTED)
    heir = heirs(requests, over)
    parent = adopt(requests, over, heir)
    state = hand_on(state, slots.occupied & over[slots.request], heir[slots.request])
    status = jnp.where(over, Status.FREE, state.requests.status)
    swap = state.swap and state.swap.without(over)
    return replace(state, requests=replace(state.requests, status=status, parent=parent), swap=swap)


def preempt(state: EngineState, budget: int) -> EngineState:
    """Sends running requests back to the queue, from the last in `running_order` on: until the pages that the others
    need now are there, and then until the head of the queue can be admitted, if it ranks before them."""
    state = _noted(state)
    state = _discard(state, for_pages(state, grant(state, budget)))
    return _discard(state, for_the_head(state, budget))


def for_pages(state: EngineState, tokens: jax.Array) -> jax.Array:
    """The requests `[S] bool` whose pages the others need to compute `tokens` `[S]`.

    If the first m requests stay, they need `sum(need[:m])` new pages and have the unused pages and those that
    only the rest uses. The one grows with m and the other shrinks, so the largest m that fits is a count, not a
    search. The first request alone always fits: no request is accepted whose pages exceed the pool.
    """
    order = running_order(state)
    occupied = state.slots.occupied[order]
    needed = jnp.cumsum(pages_needed(state, tokens)[order], dtype=jnp.int32)
    stays = occupied & (needed <= state.available_pages + _given_back(state, order))
    return jnp.zeros_like(occupied).at[order].set(occupied & ~stays)


def for_the_head(state: EngineState, budget: int, *, from_host: bool = False) -> jax.Array:
    """The fewest victims `[S] bool` that let the head of the queue in, by the arithmetic of `admit`. Each must rank
    below it in both orders, by the victim policy and in the queue: otherwise it would be readmitted at once. Pages that
    the head would find count as its own, which is on the safe side. Only an exchange makes room for a request that must
    be admitted `from_host`."""
    slots, requests = state.slots, state.requests
    order = running_order(state)
    occupied = slots.occupied[order]
    (head, waits_behind), rank = head_of_queue(state), standing(state)
    row = slots.request[order]
    comes = ready(state)[head]
    if state.swap is not None and not from_host:
        comes &= state.swap.num_computed_tokens[head] == 0
    # Its parent, if that is why it is ready, has to stay.
    stands = (rank[row] <= rank[head]) | ~waits_behind[row] | (order == parent_slots(state)[head])

    want = wanted(state)
    tokens = jnp.cumsum(want[order], dtype=jnp.int32)
    spoken_for = jnp.cumsum(pages_needed(state, want)[order], dtype=jnp.int32)
    own = -(-requests.num_tokens[head] // state.pool.page_size)
    count = jnp.arange(1, slots.num_slots + 1, dtype=jnp.int32)

    def admits(stay, tokens, spoken_for, given_back):
        pages = spoken_for + stay + own
        return (stay < slots.num_slots) & (tokens < budget) & (pages <= state.available_pages + given_back)

    # fits[m]: with the first m and the head.
    given_back = _given_back(state, order)
    no_other = admits(0, 0, 0, jnp.sum(state.refcount > 0, dtype=jnp.int32) - 1)
    fits = jnp.concatenate([no_other[None], admits(count, tokens, spoken_for, given_back)])
    running = jnp.sum(occupied, dtype=jnp.int32)
    least = jnp.where(
        comes, jnp.max(jnp.where(occupied & stands, count, 0)), running
    )  # and those before one that stays
    m = jnp.arange(slots.num_slots + 1, dtype=jnp.int32)
    stay = jnp.max(jnp.where(fits & (m >= least) & (m <= running), m, -1))
    gone = occupied & (stay >= 0) & (count > stay)
    return jnp.zeros_like(occupied).at[order].set(gone)


def _noted(state: EngineState) -> EngineState:
    """With a record of what an exchange did before this step."""
    empty = Notes.empty(state.slots.num_slots, 0 if state.swap is None else state.swap.notes.placed.most)
    notes = empty if state.swap is None else state.swap.notes
    record = replace(
        state.record,
        left=notes.left,
        to_host=notes.to_host,
        restored=notes.restored,
        preempted=jnp.sum(notes.left != NO_REQUEST, dtype=jnp.int32),
        discarded=notes.discarded,
    )
    return replace(state, record=record, swap=state.swap and replace(state.swap, notes=empty))


def _discard(state: EngineState, victim: jax.Array) -> EngineState:
    """The requests in the slots of `victim` `[S] bool` wait again, and what they have computed is lost."""
    record, lost = state.record, jnp.where(victim, state.slots.num_computed_tokens, 0)
    record = replace(
        record,
        preempted=record.preempted + jnp.sum(victim, dtype=jnp.int32),
        discarded=record.discarded + jnp.sum(lost, dtype=jnp.int32),
    )
    return replace(send_back(state, victim), record=record)


def send_back(state: EngineState, victim: jax.Array) -> EngineState:
    """The requests in the slots of `victim` `[S] bool` wait again."""
    slots, requests = state.slots, state.requests
    row = jnp.where(victim, slots.request, requests.num_rows)
    state = hand_on(state, victim)
    count = jnp.sum(victim, dtype=jnp.uint32)
    return replace(
        state,
        requests=replace(
            requests,
            status=requests.status.at[row].set(Status.WAITING, mode="drop"),
            preempted=requests.preempted.at[row].set(True, mode="drop"),
        ),
        counters=replace(state.counters, preemptions=state.counters.preemptions + count),
    )


def _given_back(state: EngineState, order: jax.Array) -> jax.Array:
    """Pages `[S]` that become unused if all requests after each one in `order` go."""
    held = _held_by_none_before(state, order)[order]
    return jnp.sum(held, dtype=jnp.int32) - jnp.cumsum(held, dtype=jnp.int32)


def _held_by_none_before(state: EngineState, order: jax.Array) -> jax.Array:
    """Pages `[S]` in each slot's table that are in none before it in `order` `[S]`: those that come back when it goes
    after all that are behind it."""
    slots = state.slots
    place = jnp.zeros_like(order).at[order].set(jnp.arange(slots.num_slots, dtype=order.dtype))
    before = bits_of(place[None] < place[:, None])  # [S, W]
    return slots.num_pages - leading(slots, lambda page: jnp.any(state.holders[:, page].T & before != 0, axis=1))
