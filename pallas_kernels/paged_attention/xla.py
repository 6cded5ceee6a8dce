"""Ragged paged attention in XLA operations, for any backend.

Queries are cut into tiles of one request each, and the keys of a tile are walked in chunks with an online softmax
(Milakov and Gimelshein 2018, as in FlashAttention), so that memory is bounded by the tiles. What is left is to
keep short requests from waiting for long ones. Tiles are sorted by how many chunks they have, longest first; the
tiles that have a j-th chunk are then the first `active[j]` of them, and the work

          chunk 0   1   2   3        one loop iteration: a group of neighbouring tiles, one chunk each
    tile A   x  x | x | x | x        the loop goes down the columns, column after column
    tile B   x  x | x | x
    tile C   x  x                    iterations: sum over j of ceil(active[j] / group)

is covered by the fewest groups. A group is a slice, not a gather. Each tile sees its chunks in order, at fixed
boundaries, so its result does not depend on the tiles beside it.

Rows with one query (decoding) and rows with more (prefill chunks) are walked apart: a tile of 16 queries is a waste
for one, and a tile of one reads the keys again for every query.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

#: Keys walked at a time, and tiles in a group (of one query, of several): what an iteration reads stays in a core's
#: cache, and its operations are too small to be split over cores, which costs more here than it saves. Measured on
#: 2 CPU cores; see ARCHITECTURE.md.
CHUNK = 64
GROUP_OF_ONE = 2
GROUP_OF_SEVERAL = 4
#: Queries in a tile where rows may bring many tokens (a prefill chunk).
TILE = 16

_MASKED = -1e30  # finite, so that a fully masked chunk does not make the running maximum inf - inf


# Traced once for all layers of a model: the layer is an operand.
@partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap"))
def paged_attention_xla(
    queries, k_pages, v_pages, layer, page_table, query_start, kv_len, *, scale, sliding_window=None, soft_cap=None
) -> jax.Array:
    """See `paged_attention`. Temporary memory grows with tokens, heads and rows, not with pages or lengths."""
    tokens, rows = queries.shape[0], kv_len.shape[0]
    count = query_start[1:] - query_start[:-1]
    shared = (queries, k_pages, v_pages, layer, page_table, query_start, kv_len)
    options = (scale, sliding_window, soft_cap)
    if tokens <= rows:
        return _attend(*shared, count, 1, tokens, *options)
    tile = min(TILE, tokens)
    alone = _attend(*shared, jnp.where(count == 1, count, 0), 1, rows, *options)
    # A row of several queries has at most one tile that is not full.
    most = tokens // tile + min(rows, tokens // 2)
    several = _attend(*shared, jnp.where(count > 1, count, 0), tile, most, *options)
    return alone + several


def _attend(
    queries, k_pages, v_pages, layer, page_table, query_start, kv_len, count, tile, num_tiles, scale, sliding_window,
    soft_cap,
) -> jax.Array:  # fmt: skip
    """Attention of the first `count[r]` queries of each row, all or none of them; zero for other tokens."""
    tokens, heads, head_dim = queries.shape
    rows, max_pages = page_table.shape
    kv_heads, page_size = k_pages.shape[2:4]
    shared_heads = heads // kv_heads
    group = min(GROUP_OF_ONE if tile == 1 else GROUP_OF_SEVERAL, num_tiles)

    # A chunk is some whole pages, or a whole part of one page.
    if page_size <= CHUNK:
        pages_per_chunk, part = max(1, min(CHUNK // page_size, max_pages)), page_size
    else:
        pages_per_chunk, part = 1, next(d for d in range(CHUNK, 0, -1) if page_size % d == 0)
    parts_per_page = page_size // part
    chunk = pages_per_chunk * part
    max_chunks = -(-max_pages * page_size // chunk)
    page_table = jnp.pad(page_table, ((0, 0), (0, -max_pages % pages_per_chunk)))

    # Cut rows into tiles. Tile i belongs to the row whose tiles end after i; comparing with all is one pass.
    tiles = -(-count // tile)
    tile_end = jnp.cumsum(tiles, dtype=jnp.int32)
    index = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(index[:, None] >= tile_end, axis=1, dtype=jnp.int32), rows - 1)
    offset = (index - (tile_end - tiles)[row]) * tile
    length = jnp.where(index < tile_end[-1], jnp.clip(count[row] - offset, 0, tile), 0)
    first_query = query_start[row] + offset
    first_position = kv_len[row] - count[row] + offset
    begin = jnp.zeros_like(first_position)
    if sliding_window is not None:
        begin = jnp.maximum(first_position - sliding_window + 1, 0) // chunk
    num_chunks = jnp.where(length > 0, (first_position + length + chunk - 1) // chunk - begin, 0)

    order = jnp.argsort(-num_chunks, stable=True).astype(jnp.int32)
    row, first_query, first_position, begin, length, num_chunks = (
        a[order] for a in (row, first_query, first_position, begin, length, num_chunks)
    )
    tile_pages = page_table[row]
    query_index = first_query[:, None] + jnp.arange(tile, dtype=jnp.int32)
    tiled = queries.at[query_index].get(mode="clip")  # [tiles, tile, heads, head_dim]
    tiled = tiled.reshape(num_tiles, tile, kv_heads, shared_heads, head_dim).transpose(0, 2, 3, 1, 4)
    tiled = tiled.reshape(num_tiles, kv_heads, shared_heads * tile, head_dim)
    tiled = tiled * jnp.asarray(scale, queries.dtype)

    # The order of the walk: after which iteration each column of chunks is done.
    active = jnp.sum(num_chunks > jnp.arange(max_chunks, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    column_end = jnp.cumsum(-(-active // group), dtype=jnp.int32)
    total = column_end[-1]

    def load(pages, where, token):  # -> [group * pages_per_chunk, kv_heads, part, head_dim]
        zero = jnp.zeros_like(where)
        return jax.lax.gather(
            pages,
            jnp.stack([jnp.full_like(where, layer), where, zero, token], axis=-1),
            jax.lax.GatherDimensionNumbers(
                offset_dims=(1, 2, 3), collapsed_slice_dims=(0, 1), start_index_map=(0, 1, 2, 3)
            ),
            slice_sizes=(1, 1, kv_heads, part, head_dim),
            mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        )

    def arrange(pages):
        pages = pages.reshape(group, pages_per_chunk, kv_heads, part, head_dim).transpose(0, 2, 1, 3, 4)
        return pages.reshape(group, kv_heads, chunk, head_dim)

    def walk(carry):
        iteration, top, norm, out = carry
        column = jnp.sum(iteration >= column_end, dtype=jnp.int32)
        start = (iteration - jnp.where(column > 0, column_end[column - 1], 0)) * group
        # A slice is moved up where it would pass the end: tiles it repeats there are masked.
        at = jnp.minimum(start, num_tiles - group)
        fresh = at + jnp.arange(group, dtype=jnp.int32) >= start

        def take(array):
            return jax.lax.dynamic_slice_in_dim(array, at, group)

        chunk_index = take(begin) + column
        columns = (chunk_index // parts_per_page * pages_per_chunk)[:, None]
        columns = columns + jnp.arange(pages_per_chunk, dtype=jnp.int32)
        where = jnp.take_along_axis(take(tile_pages), columns, axis=1, mode="clip").reshape(-1)
        token = jnp.repeat(chunk_index % parts_per_page * part, pages_per_chunk)
        key_position = chunk_index[:, None] * chunk + jnp.arange(chunk, dtype=jnp.int32)
        last = take(first_position) + take(length)
        visible = (key_position < last[:, None]) & (fresh & (take(num_chunks) > column))[:, None]
        # Unused slots of a page can hold anything. A score of NaN is replaced below, but 0 times NaN is NaN.
        v = jnp.where(visible.reshape(-1, 1, part, 1), load(v_pages, where, token), 0)
        k, v = arrange(load(k_pages, where, token)), arrange(v)

        scores = jnp.einsum("gkqd,gkcd->gkqc", take(tiled), k, preferred_element_type=jnp.float32)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        position = take(first_position)[:, None, None] + jnp.arange(tile, dtype=jnp.int32)[:, None]
        seen = visible[:, None] & (key_position[:, None] <= position)  # [group, tile, chunk]
        if sliding_window is not None:
            seen &= key_position[:, None] > position - sliding_window
        seen = jnp.tile(seen, (1, shared_heads, 1))[:, None]
        scores = jnp.where(seen, scores, _MASKED)

        old_top = take(top)
        new_top = jnp.maximum(old_top, jnp.max(scores, axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0)
        keep = jnp.exp(old_top - new_top)
        new_norm = take(norm) * keep + jnp.sum(weights, axis=-1)
        values = jnp.einsum("gkqc,gkcd->gkqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        new_out = take(out) * keep[..., None] + values

        def put(array, part_of_it):
            return jax.lax.dynamic_update_slice_in_dim(array, part_of_it, at, 0)

        return iteration + 1, put(top, new_top), put(norm, new_norm), put(out, new_out)

    shape = (num_tiles, kv_heads, shared_heads * tile)
    carry = (
        jnp.int32(0),
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )
    _, _, norm, out = jax.lax.while_loop(lambda c: c[0] < total, walk, carry)

    # Back to the packed order: each token reads its place in its tile.
    out = out / jnp.where(norm > 0, norm, 1)[..., None]
    out = out.reshape(num_tiles, kv_heads, shared_heads, tile, head_dim).astype(queries.dtype)
    packed = jnp.arange(tokens, dtype=jnp.int32)
    token_row = jnp.minimum(jnp.sum(packed[:, None] >= query_start[1:], axis=1, dtype=jnp.int32), rows - 1)
    in_row = packed - query_start[token_row]
    tile_of_token = (tile_end - tiles)[token_row] + in_row // tile
    place = jnp.argsort(order)[jnp.minimum(tile_of_token, num_tiles - 1)]
    result = out[place, :, :, in_row % tile].reshape(tokens, heads, head_dim)
    return jnp.where((in_row < count[token_row])[:, None, None], result, 0)
