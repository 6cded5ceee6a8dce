"""The online softmax of one block of keys: the same on every card, in whatever layout the scores lie."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_LOG2E = math.log2(math.e)


def weigh(
    scores: jax.Array, most: jax.Array, total: jax.Array, query: jax.Array, first_key: jax.Array, layout: Any,
    *, scale: float, sliding_window: int | None, soft_cap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """What the keys of a block weigh, and what that makes of the sums before.

    Args:
        scores: `[rows, block]` float32, queries times keys.
        most, total: `[rows]` float32: the largest score so far, in powers of two, and the sum of weights over it.
        query: `[rows]` int32, position of the row's query in its request.
        first_key: position of the block's first key.
        layout: of `scores` in registers.

    Returns:
        Weights `[rows, block]`, the factor `[rows]` for sums of earlier blocks, the new `most` and `total`.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu

    if soft_cap is None:
        scores *= scale * _LOG2E
    else:
        scores = jnp.tanh(scores * (scale / soft_cap)) * (soft_cap * _LOG2E)
    after = lax.broadcast_in_dim(query - first_key, scores.shape, [0])  # how many keys a query sees, less one
    key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
    seen = key <= after
    if sliding_window is not None:
        seen &= key > after - sliding_window
    scores = jnp.where(seen, scores, -jnp.inf)

    new_most = jnp.maximum(most, scores.max(axis=1))
    # A row that has seen nothing yet: -inf less -inf would be no number.
    base = jnp.where(new_most == -jnp.inf, jnp.float32(0), new_most)
    decay = jnp.exp2(most - base)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(base, scores.shape, [0]))
    return weights, decay, new_most, total * decay + weights.sum(axis=1)


def log_sum_exp(most: jax.Array, total: jax.Array) -> jax.Array:
    """The natural logarithm of the sum of what `weigh` has counted; -inf where that is nothing."""
    return jnp.where(total == 0, -jnp.inf, most * (1 / _LOG2E) + jnp.log(total))
