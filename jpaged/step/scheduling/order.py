"""The orders of running and of waiting requests, from the policies of the state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jpaged.policy import Policy, PolicyRequests, QueuedRequests
from jpaged.step.sharing.fork import ready
from jpaged.step.sharing.index import cached_tokens
from jpaged.step.state import EngineState


def running_order(state: EngineState) -> jax.Array:
    """Slots `[S]` in the order in which they are served, and kept; empty ones last."""
    row = state.slots.request
    return _order(standing(state)[row], state.requests.arrival[row], state.slots.occupied)


def running_rank(state: EngineState) -> jax.Array:
    """The place `[S]` of each slot in `running_order`."""
    order = running_order(state)
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))


def queue_order(state: EngineState) -> jax.Array:
    """Rows of requests `[R]` in the order in which they are admitted; those that are not `ready` last."""
    return _order(_queue_numbers(state), state.requests.arrival, ready(state))


def head_of_queue(state: EngineState) -> tuple[jax.Array, jax.Array]:
    """The first in `queue_order`, a row `[]`; and whether each request `[R] bool`, if it waited, would be behind it."""
    numbers, arrival = _sortable(_queue_numbers(state)), state.requests.arrival
    last, there = jnp.iinfo(numbers.dtype).max, ready(state)
    first = there & (numbers == jnp.min(jnp.where(there, numbers, last)))
    # If none waits, a row that is not `ready`: callers look at that.
    head = jnp.argmin(jnp.where(first, arrival, jnp.iinfo(jnp.int32).max)).astype(jnp.int32)
    same = (numbers == numbers[head]) & (arrival > arrival[head])
    return head, (numbers > numbers[head]) | same


def _queue_numbers(state: EngineState) -> jax.Array:
    requests = state.requests
    found = cached_tokens(
        state.prefixes, requests.prefix_hash, requests.namespace, requests.num_tokens, state.pool.page_size
    )  # left out of the program where no policy looks at it
    return _numbers(
        state.admission, QueuedRequests(**_constants(state), num_tokens=requests.num_tokens, cached_tokens=found)
    )


def standing(state: EngineState) -> jax.Array:
    """What the victim policy says of each request `[R]`."""
    return _numbers(state.victim, PolicyRequests(**_constants(state)))


def _constants(state: EngineState) -> dict[str, jax.Array]:
    requests = state.requests
    own = {name: getattr(requests, name) for name in ("arrival", "priority", "num_prompt_tokens")}
    return own | {"max_len": requests.sampling.max_len}


def _numbers(policy: Policy, requests: Any) -> jax.Array:
    numbers = jnp.asarray(policy(requests))
    expected = requests.arrival.shape
    if numbers.shape != expected or not (
        jnp.issubdtype(numbers.dtype, jnp.integer) or jnp.issubdtype(numbers.dtype, jnp.floating)
    ):
        raise ValueError(
            f"the policy {policy!r} must give each of {expected[0]} requests a number, an array {expected} of integers "
            f"or floating point; it gave {numbers.dtype}{numbers.shape}"
        )
    return numbers


def _sortable(numbers: jax.Array) -> jax.Array:
    """Integers in the order of `numbers` as a sort sees it: -0 is 0, and NaN comes last."""
    if jnp.issubdtype(numbers.dtype, jnp.integer):
        return numbers
    if numbers.dtype.itemsize < 4:
        numbers = numbers.astype(jnp.float32)
    nan = jnp.full((), jnp.nan, numbers.dtype)
    numbers = jnp.where(numbers == 0, jnp.zeros_like(numbers), jnp.where(jnp.isnan(numbers), nan, numbers))
    bits = jax.lax.bitcast_convert_type(numbers, jnp.int32 if numbers.dtype.itemsize == 4 else jnp.int64)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _order(numbers: jax.Array, arrival: jax.Array, there: jax.Array) -> jax.Array:
    index = jnp.arange(arrival.shape[0], dtype=jnp.int32)
    return jax.lax.sort(((~there).astype(jnp.int32), numbers, arrival, index), num_keys=3)[-1]
