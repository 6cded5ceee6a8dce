"""How many tokens each running request computes in a step.

One rule serves prefill, chunked prefill, decoding and resuming: a request wants `known - computed` tokens. First every
running request gets one, in the order of `running_order`, so that no decoding waits for a long prompt of
another request; then the rest of the budget is handed out, in the same order. A request gets nothing only if one
before it computes the same page: the next step finds it there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jpaged.step.pages import take_unused
from jpaged.step.scheduling.order import running_order
from jpaged.step.sharing.lookup import waits
from jpaged.step.state import EngineState


def wanted(state: EngineState) -> jax.Array:
    """Tokens `[S]` that each slot has still to compute."""
    slots = state.slots
    return jnp.where(slots.occupied, state.requests.num_tokens[slots.request] - slots.num_computed_tokens, 0)


def grant(state: EngineState, budget: int) -> jax.Array:
    """Tokens `[S]` that each slot computes now; their sum is at most `budget`."""
    order = running_order(state)
    want = jnp.where(waits(state), 0, wanted(state))[order]
    first = jnp.where(want > 0, jnp.clip(budget - jnp.cumsum(want > 0, dtype=jnp.int32) + 1, 0, 1), 0)
    rest = want - first
    left = budget - jnp.sum(first, dtype=jnp.int32)
    more = jnp.clip(left - (jnp.cumsum(rest, dtype=jnp.int32) - rest), 0, rest)
    return jnp.zeros_like(want).at[order].set(first + more)


def pages_needed(state: EngineState, tokens: jax.Array) -> jax.Array:
    """New pages `[S]` that each slot needs to compute `tokens` `[S]` more."""
    slots, page_size = state.slots, state.pool.page_size
    return jnp.maximum(-(-(slots.num_computed_tokens + tokens) // page_size) - slots.num_pages, 0)


def most_pages(state: EngineState, budget: int) -> int:
    """How many pages a step of `budget` tokens can begin, and how many it can fill: a row may do so once more than its
    tokens make pages."""
    return min(min(budget, state.slots.num_slots) + budget // state.pool.page_size, state.pool.num_pages)


def within_pages(state: EngineState, tokens: jax.Array) -> jax.Array:
    """`tokens` `[S]`, cut where the pages for them are not there, from the last on. Budget that a preempted request
    left to one before it may be more than its pages."""
    slots, page_size = state.slots, state.pool.page_size
    order = running_order(state)
    need = pages_needed(state, tokens)[order]
    allowed = jnp.clip(state.available_pages - (jnp.cumsum(need, dtype=jnp.int32) - need), 0, need)
    allowed = jnp.zeros_like(allowed).at[order].set(allowed)
    return jnp.minimum(tokens, (slots.num_pages + allowed) * page_size - slots.num_computed_tokens)


def schedule(state: EngineState, budget: int) -> tuple[EngineState, jax.Array]:
    """Grants tokens and takes the pages for them. Returns the state and tokens `[S]`."""
    tokens = within_pages(state, grant(state, budget))
    return take_unused(state, pages_needed(state, tokens), most_pages(state, budget)), tokens
