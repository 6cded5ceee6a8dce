"""Attention of a layer over the pages of its pool: split into heads, rotated, written, attended."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jpaged.models.layers import rotate
from jpaged.models.spec import LayerSpec
from jpaged.parallel.rules import BY_HEAD, EVERYWHERE, POOL, over_kv_heads
from jpaged.pool import SCRATCH_PAGE, KVPool, StepBatch
from pallas_kernels import kv_write, paged_attention

Pair = tuple[jax.Array, jax.Array]


def attend(
    qkv: jax.Array, rope: Pair, pool: KVPool, layer: jax.Array, batch: StepBatch, place: Pair, spec: LayerSpec
) -> tuple[jax.Array, KVPool]:
    """Writes keys and values into the pool, and attends to all that it holds of each row.

    Keys and values are stored in the pool's dtype. Where that is another one than the activations', queries take it
    too, and what comes out goes back.

    Args:
        qkv: `[kv_heads, group + 2, head_dim, tokens]`: the query heads of each KV head, its key, its value.
        rope: of `layers.rope_tables`.
        layer: which layer of the pool, `[] int32`.
        place: of `places`.

    Returns:
        `[heads * head_dim, tokens]` in the dtype of `qkv`, and the pool.
    """
    kv_heads, rows, head_dim, tokens = qkv.shape
    turned = rotate(qkv[:, :-1], *rope)  # queries and keys
    q = turned[:, :-1].transpose(3, 0, 1, 2).reshape(tokens, kv_heads * (rows - 2), head_dim)
    k, v = (a.transpose(2, 0, 1) for a in (turned[:, -1], qkv[:, -1]))
    q, k, v = (a.astype(pool.k.dtype) for a in (q, k, v))

    def write_and_attend(q, k, v, pool, layer, batch, place):
        pool = KVPool(*kv_write(pool.k, pool.v, k, v, layer, *place))
        out = paged_attention(
            q, pool.k, pool.v, layer, batch.page_table, batch.query_start, batch.kv_len,
            scale=spec.attention_scale, sliding_window=spec.sliding_window,
        )  # fmt: skip
        return out, pool

    split = over_kv_heads(
        write_and_attend, (BY_HEAD, BY_HEAD, BY_HEAD, POOL, EVERYWHERE, EVERYWHERE, EVERYWHERE), (BY_HEAD, POOL)
    )
    out, pool = split(q, k, v, pool, layer, batch, place)
    return out.reshape(tokens, -1).astype(qkv.dtype).T, pool


def places(batch: StepBatch, page_size: int) -> Pair:
    """Page and offset, `[tokens] int32` both, where the key and value of each token go."""
    padding = batch.token_row == batch.num_rows
    row = jnp.minimum(batch.token_row, batch.num_rows - 1)
    page = batch.page_table[row, batch.positions // page_size]
    return jnp.where(padding, SCRATCH_PAGE, page), batch.positions % page_size
