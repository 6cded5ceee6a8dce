"""Who comes in from the queue."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from jpaged.step.schedule import pages_needed, wanted
from jpaged.step.state import EngineState, Status

_LAST = jnp.iinfo(jnp.int32).max


def admit(state: EngineState, budget: int) -> EngineState:
    """Gives slots to the requests at the head of the queue, in order, while there are slots, tokens and pages.

    A request comes in only if something of the token budget is left for it, and if the pages of all its known
    tokens are free beside what is spoken for:

        free pages = those that the known tokens of running requests still need
                   + one for each request that runs before it (the next page its decoding begins)
                   + those of the requests admitted before it
                   + its own

    The second line keeps a request from being admitted only to be preempted within a page's worth of steps. With
    nothing running, a request needs its own pages alone, so the head of the queue always gets in at last.
    """
    slots, requests, page_size = state.slots, state.requests, state.pool.page_size
    num_slots, num_rows = slots.num_slots, requests.num_rows
    count = min(num_slots, num_rows)

    waiting = requests.status == Status.WAITING
    queue = jnp.argsort(jnp.where(waiting, requests.arrival, _LAST), stable=True)[:count]
    rank = jnp.arange(count, dtype=jnp.int32)

    running = jnp.sum(slots.occupied, dtype=jnp.int32)
    want = wanted(state)
    known = jnp.where(waiting[queue], requests.known[queue], 0)
    tokens_before = jnp.sum(want, dtype=jnp.int32) + jnp.cumsum(known, dtype=jnp.int32) - known

    own = -(-known // page_size)
    spoken_for = jnp.sum(pages_needed(state, want), dtype=jnp.int32)
    pages = spoken_for + running + rank + jnp.cumsum(own, dtype=jnp.int32)

    fits = waiting[queue] & (rank < num_slots - running) & (tokens_before < budget) & (pages <= state.free_pages)
    # Strictly in order: nobody overtakes one who does not fit yet.
    enters = jnp.cumsum(~fits) == 0

    empty = jnp.nonzero(~slots.occupied, size=count, fill_value=num_slots)[0]
    slot = jnp.where(enters, empty, num_slots)
    row = jnp.where(enters, queue, num_rows)
    slots = replace(
        slots,
        occupied=slots.occupied.at[slot].set(True, mode="drop"),
        request=slots.request.at[slot].set(queue.astype(jnp.int32), mode="drop"),
    )
    return replace(
        state,
        slots=slots,
        requests=replace(requests, status=requests.status.at[row].set(Status.RUNNING, mode="drop")),
        record=replace(state.record, admitted=jnp.sum(enters, dtype=jnp.int32)),
    )
