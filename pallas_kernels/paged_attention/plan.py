"""Who computes what: a ragged batch cut into tiles of queries, and long contexts into parts, as arrays of fixed shape.

A *tile* is up to `tile_tokens` queries of one row, with all query heads that share a KV head: one operand of a matrix
product. Queries are laid out so that every tile begins at a multiple of `align` of them. A *part* is a stretch of the
context that one tile sees, in blocks of keys; different parts of a tile run side by side and are merged afterwards by
their log-sum-exp (flash-decoding). The plan is traced: it is a few prefix sums and searches of the lengths of this
step, so that nothing waits for the host, and one long context among short ones is cut as finely as it needs.

    row 0: 3 queries, context 37      tile 0 |q q q|   parts 0, 4     4 |....|....|
    row 1: 1 query,  context 4        tile 1 |q . .|   part  1          |....|
    row 2: 4 queries, context 9       tile 2 |q q q|   part  2          |....|....|
                                      tile 3 |q . .|   part  3          |....|....|

Part `t` is the first of tile `t`; the `extra_parts` after those belong to whichever tile is longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

#: Rows after which the pattern of a swizzled tile in shared memory repeats: where a tile can begin, and end.
SWIZZLED_ROWS = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """All int32. `tiles` and `parts = tiles + extra_parts` are static; those that are not needed see no keys.

    Attributes:
        row: `[parts]` row of the batch.
        tile: `[parts]` tile that the part belongs to; `tiles` where the part is not needed.
        start: `[parts]` where the tile's first query lies among the aligned ones; a multiple of `align`.
        position: `[parts]` position of that query in its request.
        length: `[parts]` tokens of the row.
        begin, end: `[parts]` blocks of keys that the part sees, `begin` up to before `end`.
        first_extra: `[tiles]` the first of the extra parts that belong to the tile; `extra_parts` where none does.
        aligned: `[num_aligned]` which packed query lies there; any, where none does.
        token_tile: `[tokens]` tile of each packed query; `tiles` for padding.
        token_place: `[tokens]` its place in that tile.
    """

    row: jax.Array
    tile: jax.Array
    start: jax.Array
    position: jax.Array
    length: jax.Array
    begin: jax.Array
    end: jax.Array
    first_extra: jax.Array
    aligned: jax.Array
    token_tile: jax.Array
    token_place: jax.Array


def num_tiles(tokens: int, rows: int, tile_tokens: int) -> int:
    """The most tiles that `tokens` packed queries of `rows` rows can need."""
    return min(tokens, tokens // tile_tokens + rows)


def num_rows(tokens: int, group: int) -> int:
    """The rows of a tile of `tokens` queries with the `group` query heads that share a KV head."""
    return -(-tokens * group // SWIZZLED_ROWS) * SWIZZLED_ROWS


def num_aligned(tokens: int, rows: int, tile_tokens: int, align: int) -> int:
    """The most places that the queries need where every tile begins at a multiple of `align`."""
    return tokens * align if tile_tokens == 1 else tokens + (align - 1) * min(tokens, rows)


def make_plan(
    query_start: jax.Array,
    kv_len: jax.Array,
    *,
    tokens: int,
    tile_tokens: int,
    align: int,
    block: int,
    extra_parts: int,
    sliding_window: int | None,
) -> Plan:
    """The plan of one call.

    Args:
        query_start: `[rows + 1]` int32. kv_len: `[rows]` int32. Both as in `paged_attention`.
        tokens: packed queries, padding included.
        tile_tokens: queries of a tile; 1, or a multiple of `align`.
        align: queries that tiles are aligned to.
        block: keys of a block.
        extra_parts: parts beyond one a tile, to be given to long contexts; 0: no context is cut.
        sliding_window: as in `paged_attention`.
    """
    rows = kv_len.shape[0]
    tiles = num_tiles(tokens, rows, tile_tokens)
    queries = query_start[1:] - query_start[:-1]
    tiles_end = jnp.cumsum(-(-queries // tile_tokens), dtype=jnp.int32)

    tile = jnp.arange(tiles, dtype=jnp.int32)
    row = _owner(tiles_end, tile)
    needed = tile < tiles_end[-1]
    # Which of the row's tiles: the queries of the others come before.
    nth_tile = tile - _before(tiles_end, row)
    before = nth_tile * tile_tokens
    position = kv_len[row] - queries[row] + before

    stride = align if tile_tokens == 1 else tile_tokens
    places = queries * align if tile_tokens == 1 else -(-queries // align) * align
    aligned_end = jnp.cumsum(places, dtype=jnp.int32)
    place = jnp.arange(num_aligned(tokens, rows, tile_tokens, align), dtype=jnp.int32)
    place_row = _owner(aligned_end, place)
    of_row = place - _before(aligned_end, place_row)
    aligned = query_start[place_row] + of_row // stride * tile_tokens + of_row % stride

    last = jnp.minimum(position + tile_tokens, kv_len[row]) - 1
    first = jnp.zeros_like(position)
    if sliding_window is not None:
        first = jnp.maximum(position - sliding_window + 1, 0) // block
    blocks = jnp.where(needed, last // block + 1 - first, 0)

    # So long that all parts fit into the extra ones: sum(ceil(b / long)) <= sum(b) / long + tiles.
    long = jnp.maximum(jnp.max(blocks), 1)
    if extra_parts:
        long = jnp.maximum(-(-jnp.sum(blocks) // extra_parts), 1)
    extra = jnp.maximum(-(-blocks // long), 1) - 1
    extra_end = jnp.cumsum(extra, dtype=jnp.int32)
    part = jnp.arange(extra_parts, dtype=jnp.int32)
    of_extra = _owner(extra_end, part)
    nth_extra = part - _before(extra_end, of_extra) + 1

    of = jnp.concatenate([tile, of_extra])
    nth = jnp.concatenate([jnp.zeros_like(tile), nth_extra])
    used = jnp.concatenate([needed, part < extra_end[-1]]) if extra_parts else needed
    begin = first[of] + nth * long
    end = jnp.minimum(begin + long, (first + blocks)[of])

    packed = jnp.arange(tokens, dtype=jnp.int32)
    packed_row = _owner(query_start[1:], packed)
    within = packed - query_start[packed_row]
    real = packed < query_start[-1]
    return Plan(
        row=row[of],
        tile=jnp.where(used, of, tiles),
        start=(_before(aligned_end, row) + nth_tile * stride)[of],
        position=position[of],
        length=kv_len[row[of]],
        begin=jnp.where(used, begin, 0),
        end=jnp.where(used, end, 0),
        first_extra=jnp.where(extra > 0, extra_end - extra, extra_parts),
        aligned=jnp.minimum(aligned, tokens - 1),
        token_tile=jnp.where(real, _before(tiles_end, packed_row) + within // tile_tokens, tiles),
        token_place=within % tile_tokens,
    )


def _owner(ends: jax.Array, index: jax.Array) -> jax.Array:
    """The owner of each thing of `index`, where `ends` are the running totals of things by owner. In range even past
    the last thing."""
    found = jnp.sum(ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)  # no loop, unlike a binary search
    return jnp.minimum(found, ends.shape[0] - 1)


def _before(ends: jax.Array, owner: jax.Array) -> jax.Array:
    """How many things come before the first of `owner`."""
    return jnp.where(owner > 0, ends[owner - 1], 0)
