"""How many tokens each running request computes in a step.

One rule serves prefill, chunked prefill, decoding and resuming: a request wants `known - computed` tokens. First every
running request gets one, oldest first, so that nobody's decoding waits for another's long prompt; then the rest of
the budget is handed out, oldest first.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jpaged.step.pages import take
from jpaged.step.state import EngineState

_LAST = jnp.iinfo(jnp.int32).max


def by_age(state: EngineState) -> jax.Array:
    """Slots `[S]` in the order their requests arrived; empty slots last."""
    arrival = state.requests.arrival[state.slots.request]
    return jnp.argsort(jnp.where(state.slots.occupied, arrival, _LAST), stable=True)


def wanted(state: EngineState) -> jax.Array:
    """Tokens `[S]` that each slot has still to compute."""
    slots = state.slots
    return jnp.where(slots.occupied, state.requests.known[slots.request] - slots.computed, 0)


def grant(state: EngineState, budget: int) -> jax.Array:
    """Tokens `[S]` that each slot computes now; their sum is at most `budget`."""
    order = by_age(state)
    want = wanted(state)[order]
    first = jnp.where(want > 0, jnp.clip(budget - jnp.cumsum(want > 0, dtype=jnp.int32) + 1, 0, 1), 0)
    rest = want - first
    left = budget - jnp.sum(first, dtype=jnp.int32)
    more = jnp.clip(left - (jnp.cumsum(rest, dtype=jnp.int32) - rest), 0, rest)
    return jnp.zeros_like(want).at[order].set(first + more)


def pages_needed(state: EngineState, tokens: jax.Array) -> jax.Array:
    """New pages `[S]` that each slot needs to compute `tokens` `[S]` more."""
    slots, page_size = state.slots, state.pool.page_size
    return jnp.maximum(-(-(slots.computed + tokens) // page_size) - slots.num_pages, 0)


def schedule(state: EngineState, budget: int) -> tuple[EngineState, jax.Array]:
    """Grants tokens and takes the pages for them. Returns the state and tokens `[S]`."""
    slots = state.slots
    tokens = grant(state, budget)
    # Each row begins at most one page that its tokens do not fill.
    most = min(min(budget, slots.num_slots) + budget // state.pool.page_size, state.pool.num_pages)
    refcount, page_table, num_pages = take(
        state.refcount, slots.page_table, slots.num_pages, pages_needed(state, tokens), most
    )
    slots = replace(slots, page_table=page_table, num_pages=num_pages)
    return replace(state, refcount=refcount, slots=slots), tokens
