"""Pages and slots back from requests that ended, and from those that must make room."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jpaged.pool import SCRATCH_PAGE
from jpaged.step.pages import release
from jpaged.step.schedule import by_age, grant, pages_needed
from jpaged.step.state import EngineState, Status


def clear_slots(state: EngineState, which: jax.Array) -> EngineState:
    """Empties the slots of `which` `[S] bool` and gives their pages back. Those that can be found stay cached."""
    slots = state.slots
    return replace(
        state,
        refcount=release(state.refcount, slots.page_table, slots.num_pages, which),
        slots=replace(
            slots,
            occupied=slots.occupied & ~which,
            computed=jnp.where(which, 0, slots.computed),
            entered=jnp.where(which, 0, slots.entered),
            num_pages=jnp.where(which, 0, slots.num_pages),
            page_table=jnp.where(which[:, None], SCRATCH_PAGE, slots.page_table),
        ),
    )


def evict(state: EngineState) -> EngineState:
    """Clears out what has ended: FINISHED and ABORTED requests leave their slots, and their rows become FREE."""
    status = state.requests.status
    over = (status == Status.FINISHED) | (status == Status.ABORTED)
    state = clear_slots(state, state.slots.occupied & over[state.slots.request])
    return replace(state, requests=replace(state.requests, status=jnp.where(over, Status.FREE, status)))


def preempt(state: EngineState, budget: int) -> EngineState:
    """Sends the youngest running requests back to the queue until the pages that the others need now are there.

    If the oldest m requests stay, they need `sum(need[:m])` new pages and have those that nobody uses and those that
    only the rest uses. The first grows with m and the second shrinks, so the largest m that fits is a count, not a
    search. The oldest request alone always fits: no request is accepted whose pages exceed the pool.
    """
    slots, requests = state.slots, state.requests
    order = by_age(state)
    occupied, held = slots.occupied[order], _held_by_none_older(state, order)[order]
    need = pages_needed(state, grant(state, budget))[order]
    needed = jnp.cumsum(need, dtype=jnp.int32)
    others = jnp.sum(held, dtype=jnp.int32) - jnp.cumsum(held, dtype=jnp.int32)
    stays = occupied & (needed <= state.available_pages + others)
    victim = jnp.zeros_like(slots.occupied).at[order].set(occupied & ~stays)
    row = jnp.where(victim, slots.request, requests.num_rows)
    count = jnp.sum(victim, dtype=jnp.int32)
    discarded = jnp.sum(jnp.where(victim, slots.computed, 0), dtype=jnp.int32)
    state = clear_slots(state, victim)
    counters = replace(state.counters, preemptions=state.counters.preemptions + count.astype(jnp.uint32))
    return replace(
        state,
        requests=replace(
            requests,
            status=requests.status.at[row].set(Status.WAITING, mode="drop"),
            preempted=requests.preempted.at[row].set(True, mode="drop"),
        ),
        counters=counters,
        record=replace(state.record, preempted=count, discarded=discarded),
    )


def _held_by_none_older(state: EngineState, order: jax.Array) -> jax.Array:
    """Pages `[S]` in each slot's table that are in no older request's: those that come back when it goes after all
    who are younger. `order` `[S]` is that of age."""
    slots = state.slots
    named = jnp.arange(slots.page_table.shape[1], dtype=jnp.int32) < slots.num_pages[:, None]
    age = jnp.zeros_like(order).at[order].set(jnp.arange(slots.num_slots, dtype=order.dtype))
    oldest = jnp.full(state.refcount.shape, slots.num_slots, order.dtype)
    oldest = oldest.at[slots.page_table].min(jnp.where(named, age[:, None], slots.num_slots))
    return jnp.sum(named & (oldest[slots.page_table] == age[:, None]), axis=1, dtype=jnp.int32)
