"""Products with weights. Every one of them, and the lookup of embeddings, goes through this module.

Activations are columns, `[features, tokens]`, and a weight is `[out, in]`, as checkpoints store it: it multiplies
columns from the left. On a CPU that product is the faster one at every number of tokens (docs/measurements.md), and no
weight is ever transposed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def linear(weight: jax.Array, x: jax.Array, dtype: Any = None) -> jax.Array:
    """`weight` `[..., in]` times `x` `[in, tokens]`: `[out, tokens]`, where `out` counts the rows of all leading axes.

    Args:
        dtype: of the result; None: that of the operands.
    """
    return jnp.matmul(weight.reshape(-1, weight.shape[-1]), x, preferred_element_type=dtype)


def embedding(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Rows of `table` `[vocab, hidden]` for `token_ids` `[tokens]`, as columns: `[hidden, tokens]`."""
    return table[token_ids].T
