"""Ragged paged attention in plain jnp: the specification. Its memory grows with everything; use it to test."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def paged_attention_reference(
    queries, k_pages, v_pages, layer, page_table, query_start, kv_len,
    *, scale, sliding_window=None, soft_cap=None, return_lse=False,
) -> jax.Array | tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `paged_attention`. Computes in float32 (float64 for float64 queries)."""
    tokens, heads, head_dim = queries.shape
    rows, max_pages = page_table.shape
    kv_heads, page_size = k_pages.shape[2:4]
    dtype = jnp.float64 if queries.dtype == jnp.float64 else jnp.float32

    token = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.searchsorted(query_start[1:], token, side="right").astype(jnp.int32)
    padding = row >= rows
    row = jnp.minimum(row, rows - 1)
    position = kv_len[row] - query_start[row + 1] + token

    def gather(pages):  # [rows, heads, context, head_dim]
        pages = pages[layer][page_table].astype(dtype)  # [rows, max_pages, kv_heads, page_size, head_dim]
        pages = pages.transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, max_pages * page_size, head_dim)
        return jnp.repeat(pages, heads // kv_heads, axis=1)

    key_position = jnp.arange(max_pages * page_size, dtype=jnp.int32)
    seen = key_position <= position[:, None]
    if sliding_window is not None:
        seen &= key_position > position[:, None] - sliding_window
    scores = jnp.einsum("thd,thcd->thc", queries.astype(dtype), gather(k_pages)[row]) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    # A weight of 0 does not silence a NaN; a value that is not seen must not be read at all.
    values = jnp.where(seen[:, None, :, None], gather(v_pages)[row], 0)
    out = jnp.einsum("thc,thcd->thd", weights, values)
    out = jnp.where(padding[:, None, None], 0, out).astype(queries.dtype)
    if not return_lse:
        return out
    lse = jax.nn.logsumexp(scores, axis=-1).astype(jnp.float32)
    return out, jnp.where(padding[:, None], -jnp.inf, lse)
