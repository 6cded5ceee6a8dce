"""Admission: which requests of the queue get a slot."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jpaged.pool import SCRATCH_PAGE
from jpaged.step.pages import page_at
from jpaged.step.scheduling.grant import pages_needed, wanted
from jpaged.step.scheduling.order import queue_order
from jpaged.step.sharing.fork import COPIES, parent_slots, ready
from jpaged.step.sharing.lookup import lookup, pin, shareable
from jpaged.step.state import EngineState
from jpaged.step.status import NO_REQUEST, Status


def admit(state: EngineState, budget: int, *, from_host: bool = False) -> tuple[EngineState, jax.Array]:
    """Gives slots to the requests at the head of `queue_order`, in order, while there are slots, tokens and pages.

    The cached pages of a request are looked up first, and are in its table in the same step: none of them can be taken
    in between. A request is admitted only if some of the token budget is left for it, and if the pool has pages for
    all its tokens beside those that are reserved:

        unused pages >= those that the tokens of running requests still need
                      + one for each request that runs before it (the next page that its decoding begins)
                      + those of the requests admitted before it
                      + its own, without those found that are in use

    The second line keeps a request from being admitted only to be preempted within a page's worth of steps. With
    nothing running, a request needs its own pages alone, so the head of the queue is always admitted at last. An unused
    page that two requests find in the same step counts for both, which is on the safe side.

    Requests with pages on the host are admitted by an exchange, `from_host`, and no others; a step waits for it.

    Returns:
        The state; and for each slot `[S]` the page of which a fork that is admitted there needs a copy, for its next
        page to begin with. SCRATCH_PAGE: none.
    """
    slots, requests, page_size = state.slots, state.requests, state.pool.page_size
    num_slots, num_rows = slots.num_slots, requests.num_rows
    count = min(num_slots, num_rows)

    waiting = ready(state)
    queue = queue_order(state)[:count]
    rank = jnp.arange(count, dtype=jnp.int32)
    known = jnp.where(waiting[queue], requests.num_tokens[queue], 0)

    nothing = jnp.zeros_like(queue)
    pages_asked = jnp.maximum(shareable(known, page_size), 0)
    parent = jnp.where(waiting, parent_slots(state), num_slots)[queue]
    forks = parent < num_slots
    found = lookup(state, queue, nothing, pages_asked, jnp.full_like(queue, SCRATCH_PAGE), parent)
    tail = jnp.where(forks, known - 1 - pages_asked * page_size, 0)  # tokens that are in a page to be copied
    in_use = found.hit & (state.refcount[found.page] > 0)
    hits, hits_in_use = (nothing.at[found.owner].add(hit.astype(jnp.int32)) for hit in (found.hit, in_use))
    # A request that does not fit in this lookup is admitted after the next; the head with what was looked up of it.
    looked_up = (rank == 0) | (jnp.cumsum(pages_asked, dtype=jnp.int32) <= found.asked)

    running = jnp.sum(slots.occupied, dtype=jnp.int32)
    want = wanted(state)
    more = known - hits * page_size - tail
    tokens_before = jnp.sum(want, dtype=jnp.int32) + jnp.cumsum(more, dtype=jnp.int32) - more

    own = -(-known // page_size) - hits_in_use
    spoken_for = jnp.sum(pages_needed(state, want), dtype=jnp.int32)
    pages = spoken_for + running + rank + jnp.cumsum(own, dtype=jnp.int32)

    fits = waiting[queue] & looked_up & (rank < num_slots - running)
    fits &= (tokens_before < budget) & (pages <= state.available_pages)
    fits &= jnp.cumsum(tail > 0, dtype=jnp.int32) <= COPIES
    if state.swap is not None:
        fits &= (state.swap.num_computed_tokens[queue] > 0) == from_host
    # Strictly in order: no request overtakes one that does not fit yet.
    enters = jnp.cumsum(~fits) == 0

    empty = jnp.nonzero(~slots.occupied, size=count, fill_value=num_slots)[0]
    slot = jnp.where(enters, empty, num_slots)
    row = jnp.where(enters, queue, num_rows)
    slots = replace(
        slots,
        occupied=slots.occupied.at[slot].set(True, mode="drop"),
        request=slots.request.at[slot].set(queue, mode="drop"),
        num_computed_tokens=slots.num_computed_tokens.at[slot].set(tail, mode="drop"),
    )
    last = page_at(slots.page_table, jnp.minimum(parent, num_slots - 1), pages_asked)
    source = jnp.full(num_slots, SCRATCH_PAGE, jnp.int32)
    source = source.at[slot].set(jnp.where(tail > 0, last, SCRATCH_PAGE), mode="drop")
    counted = enters & ~requests.preempted[queue] & ~forks
    queries = jnp.sum(jnp.where(counted, known, 0), dtype=jnp.int32)
    state = replace(
        state,
        slots=slots,
        requests=replace(requests, status=requests.status.at[row].set(Status.RUNNING, mode="drop")),
        counters=replace(state.counters, prefix_queries=state.counters.prefix_queries + queries.astype(jnp.uint32)),
        record=replace(
            state.record,
            admitted=jnp.sum(enters, dtype=jnp.int32),
            prefix_queries=queries,
            prefix_hits=jnp.int32(0),
            recovered=jnp.int32(0),
        ),
    )
    state = pin(state, found, slot)
    begun = state.requests.parent.at[row].set(NO_REQUEST, mode="drop")
    return replace(state, requests=replace(state.requests, parent=begun)), source
