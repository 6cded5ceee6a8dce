"""Ragged paged attention in XLA operations, for any backend.

Queries are cut into tiles of one request each. Tiles are sorted by how many keys they see, longest first, and walk
them in chunks with an online softmax (Milakov and Gimelshein 2018, as in FlashAttention), a group of neighbours at
a time, which have about as far to go:

                       chunk 0   1   2   3
    group 0   tile A         x | x | x | x        a loop over groups; in it a loop over chunks, as many as the
              tile B         x | x | x | .        longest of the group has
    group 1   tile C         x | x
              tile D         x | .

Memory is bounded by the group: it grows neither with the pool nor with the context. Each tile sees its chunks in
order, at fixed boundaries, so its result does not depend on the tiles beside it.

On a GPU each iteration of a loop of unknown length waits for the host. There all tiles are one group, chunks are
larger, and the loop is as long as the longest row that the page table can hold, a known length: the time that it
takes follows the width of the page table, whatever the rows hold.

Rows with one query (decoding) and rows with more (prefill chunks) are walked apart: a tile of 16 queries is a waste
for one, and a tile of one reads the keys again for every query.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import target_platform

#: Where no loop needs the host, as on a CPU: keys walked at a time, and tiles in a group (of one query, of several).
#: What an iteration reads stays in a core's cache, and its operations are too small to be split over cores, which costs
#: more than it saves. Measured on 2 cores; see docs/measurements.md.
CHUNK = 64
GROUP_OF_ONE = 2
GROUP_OF_SEVERAL = 4
#: On a GPU: the most bytes of keys that an iteration loads for one tile of each row. Fewer iterations start fewer
#: kernels, of which an iteration has about ten.
WALK_BYTES = 64 << 20
#: Queries in a tile where rows may bring many tokens (a prefill chunk).
TILE = 16

_MASKED = -1e30  # finite, so that a fully masked chunk does not make the running maximum inf - inf


# Traced once for all layers of a model: the layer is an operand.
@partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap", "return_lse", "bounded"))
def paged_attention_xla(
    queries, k_pages, v_pages, layer, page_table, query_start, kv_len,
    *, scale, sliding_window=None, soft_cap=None, return_lse=False, bounded: bool | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `paged_attention`. Temporary memory grows with tokens, heads and rows, not with pages or lengths.

    Args:
        bounded: walk in a loop of known length, as long as the page table is wide; None: on a GPU.
    """
    if bounded is None:
        bounded = target_platform() == "gpu"
    tokens, rows = queries.shape[0], kv_len.shape[0]
    count = query_start[1:] - query_start[:-1]
    attend = partial(
        _attend, queries, k_pages, v_pages, layer, page_table, query_start, kv_len, scale, sliding_window, soft_cap,
        bounded,
    )  # fmt: skip
    result = jnp.zeros_like(queries), jnp.full(queries.shape[:2], -jnp.inf, jnp.float32)
    if tokens <= rows:
        result = attend(count, 1, tokens, result)
    else:
        tile = min(TILE, tokens)
        result = attend(jnp.where(count == 1, count, 0), 1, rows, result)
        # A row of several queries has at most one tile that is not full.
        most = tokens // tile + min(rows, tokens // 2)
        result = attend(jnp.where(count > 1, count, 0), tile, most, result)
    return result if return_lse else result[0]


def _attend(
    queries, k_pages, v_pages, layer, page_table, query_start, kv_len, scale, sliding_window, soft_cap, bounded,
    count, tile, num_tiles, result,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`result`, outputs `[tokens, heads, head_dim]` and log-sum-exps `[tokens, heads]`, with the attention of the first
    `count[r]` queries of each row, all of a row's or none; the rest of it is left."""
    tokens, heads, head_dim = queries.shape
    rows, max_pages = page_table.shape
    kv_heads, page_size = k_pages.shape[2:4]
    shared_heads = heads // kv_heads
    group, keys = min(GROUP_OF_ONE if tile == 1 else GROUP_OF_SEVERAL, num_tiles), CHUNK
    if bounded:
        group = num_tiles
        # The same for every number of tokens: boundaries of chunks decide how sums are rounded.
        keys = max(CHUNK, WALK_BYTES // (rows * kv_heads * head_dim * k_pages.dtype.itemsize))
    num_groups = -(-num_tiles // group)

    # A chunk is some whole pages, or a whole part of one page.
    if page_size <= keys:
        pages_per_chunk, part = max(1, min(keys // page_size, max_pages)), page_size
    else:
        pages_per_chunk, part = 1, next(d for d in range(keys, 0, -1) if page_size % d == 0)
    parts_per_page = page_size // part
    chunk = pages_per_chunk * part
    page_table = jnp.pad(page_table, ((0, 0), (0, -max_pages % pages_per_chunk)))
    most_chunks = page_table.shape[1] * page_size // chunk
    if sliding_window is not None:  # what the queries of a tile see, wherever it begins in a chunk
        most_chunks = min(most_chunks, (sliding_window + tile - 3) // chunk + 2)

    # Cut rows into tiles. Tile i belongs to the row whose tiles end after i; comparing with all is one pass.
    tiles = -(-count // tile)
    tile_end = jnp.cumsum(tiles, dtype=jnp.int32)
    index = jnp.arange(num_groups * group, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(index[:, None] >= tile_end, axis=1, dtype=jnp.int32), rows - 1)
    offset = (index - (tile_end - tiles)[row]) * tile
    length = jnp.where(index < tile_end[-1], jnp.clip(count[row] - offset, 0, tile), 0)
    first_query = query_start[row] + offset
    first_position = kv_len[row] - count[row] + offset
    begin = jnp.zeros_like(first_position)
    if sliding_window is not None:
        begin = jnp.maximum(first_position - sliding_window + 1, 0) // chunk
    num_chunks = jnp.where(length > 0, (first_position + length + chunk - 1) // chunk - begin, 0)

    of_tile: tuple[Any, ...] = row, first_query, first_position, begin, length, num_chunks
    if not bounded:  # neighbours walk together, so let them be of one length, the longest first
        order = jnp.argsort(-num_chunks, stable=True)
        of_tile = tuple(array[order] for array in of_tile)
    row, first_query, first_position, begin, length, num_chunks = (
        array.reshape(num_groups, group) for array in of_tile
    )

    def load(pages, where, offset):  # -> [group, pages_per_chunk, kv_heads, part, head_dim]
        zero = jnp.zeros_like(where)
        return jax.lax.gather(
            pages,
            jnp.stack([jnp.full_like(where, layer), where, zero, offset], axis=-1),
            jax.lax.GatherDimensionNumbers(
                offset_dims=(2, 3, 4), collapsed_slice_dims=(0, 1), start_index_map=(0, 1, 2, 3)
            ),
            slice_sizes=(1, 1, kv_heads, part, head_dim),
            mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        )

    def walk_group(index, result):
        of_group = partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False)
        tile_pages = page_table[of_group(row)]
        position, chunks, first_chunk = of_group(first_position), of_group(num_chunks), of_group(begin)
        end = position + of_group(length)
        in_tile = jnp.arange(tile, dtype=jnp.int32)
        query_position = position[:, None, None] + in_tile[:, None]
        token = of_group(first_query)[:, None] + in_tile
        # Loaded here, and not for all tiles at once: XLA on a CPU would fuse what computes the queries into it.
        q = queries.at[token].get(mode="clip").reshape(group, tile, kv_heads, shared_heads, head_dim)
        q = q.transpose(0, 2, 3, 1, 4).reshape(group, kv_heads, shared_heads * tile, head_dim)

        def walk(carry):
            column, top, norm, out = carry
            chunk_index = first_chunk + column
            columns = (chunk_index // parts_per_page * pages_per_chunk)[:, None]
            columns = columns + jnp.arange(pages_per_chunk, dtype=jnp.int32)
            where = jnp.take_along_axis(tile_pages, columns, axis=1, mode="clip")
            offset = jnp.broadcast_to((chunk_index % parts_per_page * part)[:, None], where.shape)
            key_position = chunk_index[:, None] * chunk + jnp.arange(chunk, dtype=jnp.int32)
            visible = (key_position < end[:, None]) & (column < chunks)[:, None]
            # Keys are turned while they are copied: the product would take longer to do that.
            k = load(k_pages, where, offset).transpose(0, 2, 4, 1, 3).reshape(group, kv_heads, head_dim, chunk)
            v = load(v_pages, where, offset).transpose(0, 2, 1, 3, 4).reshape(group, kv_heads, chunk, head_dim)
            # Unused slots of a page can hold anything. A score of NaN is replaced below, but 0 times NaN is NaN.
            v = jnp.where(visible[:, None, :, None], v, 0)

            scores = jnp.einsum("gkqd,gkdc->gkqc", q, k, preferred_element_type=jnp.float32) * scale
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            seen = visible[:, None] & (key_position[:, None] <= query_position)  # [group, tile, chunk]
            if sliding_window is not None:
                seen &= key_position[:, None] > query_position - sliding_window
            seen = jnp.tile(seen, (1, shared_heads, 1))[:, None]
            scores = jnp.where(seen, scores, _MASKED)

            new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
            weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0)
            keep = jnp.exp(top - new_top)
            values = jnp.einsum("gkqc,gkcd->gkqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
            return column + 1, new_top, norm * keep + jnp.sum(weights, axis=-1), out * keep[..., None] + values

        start = (
            jnp.int32(0),
            jnp.full(q.shape[:-1], _MASKED, jnp.float32),
            jnp.zeros(q.shape[:-1], jnp.float32),
            jnp.zeros(q.shape, jnp.float32),
        )
        if bounded:
            _, top, norm, out = jax.lax.fori_loop(0, most_chunks, lambda _, carry: walk(carry), start)
        else:
            _, top, norm, out = jax.lax.while_loop(lambda carry: carry[0] < chunks[0], walk, start)
        out = (out / jnp.where(norm > 0, norm, 1)[..., None]).astype(queries.dtype)
        token = jnp.where(in_tile < (end - position)[:, None], token, tokens)

        def put(result, values):  # values [group, kv_heads, shared_heads * tile, ...]
            values = values.reshape(group, kv_heads, shared_heads, tile, *values.shape[3:])
            values = jnp.moveaxis(values, 3, 1).reshape(group, tile, heads, *values.shape[4:])
            return result.at[token].set(values, mode="drop", unique_indices=True)

        return put(result[0], out), put(result[1], top + jnp.log(norm))

    return jax.lax.fori_loop(0, num_groups, walk_group, result)
