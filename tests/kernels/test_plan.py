"""How a ragged batch is cut into tiles and parts, against the same said in plain Python."""

from __future__ import annotations

from functools import cache, partial

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention.plan import make_plan, num_tiles

ROWS, TOKENS, BLOCK, ALIGN = 5, 24, 4, 2


@st.composite
def batch(draw) -> list[tuple[int, int]]:
    left, rows = TOKENS, []
    for _ in range(ROWS):
        queries = min(left, draw(st.sampled_from([0, 1, 1, 2, 5, 9, TOKENS])))
        left -= queries
        rows.append((queries, draw(st.integers(queries, 100)) if queries else 0))
    return rows


#: each pair of two values once or more
@pytest.mark.parametrize(
    ("tile_tokens", "extra", "window"),
    [(1, 0, None), (1, 1, 6), (1, 7, 1), (4, 0, 1), (4, 1, None), (4, 7, 6), (4, 7, None), (4, 0, 6), (4, 1, 1)],
)
@settings(max_examples=60)
@given(rows=batch())
@example(rows=[(0, 0)] * ROWS)
@example(rows=[(TOKENS, 100), *[(0, 0)] * (ROWS - 1)])
@example(rows=[(1, 1000), *[(1, 1)] * (ROWS - 1)])
def test_every_query_sees_every_key_that_it_should_once(tile_tokens, extra, window, rows):
    """Catches: a tile of two rows, a context with a hole or an overlap between parts, more parts than there is room
    for, padding that is given work, a part that is not its tile's."""
    start = np.cumsum([0, *(queries for queries, _ in rows)]).astype(np.int32)
    lengths = np.array([tokens for _, tokens in rows], np.int32)
    plan = _plan(tile_tokens, extra, window)(start, lengths)
    plan = jax.tree.map(np.asarray, plan)
    tiles = num_tiles(TOKENS, ROWS, tile_tokens)
    assert plan.row.shape == (tiles + extra,)
    assert (plan.tile[:tiles][plan.end[:tiles] > 0] == np.arange(tiles)[plan.end[:tiles] > 0]).all()

    blocks = {}
    for part, tile in enumerate(plan.tile):
        if tile == tiles:
            assert plan.begin[part] == plan.end[part] == 0
            continue
        assert 0 <= plan.begin[part] < plan.end[part]
        assert all(of[part] == of[tile] for of in (plan.row, plan.position, plan.start))
        assert plan.length[part] == lengths[plan.row[part]]
        blocks.setdefault(int(tile), []).extend(range(plan.begin[part], plan.end[part]))

    token = 0
    for row, (queries, tokens) in enumerate(rows):
        for first in range(0, queries, tile_tokens):
            tile = int(plan.token_tile[token])
            places = min(tile_tokens, queries - first)
            position = tokens - queries + first
            assert (plan.row[tile], plan.position[tile]) == (row, position)
            aligned = plan.aligned[plan.start[tile] : plan.start[tile] + places]
            assert plan.start[tile] % ALIGN == 0 and aligned.tolist() == list(range(token, token + places))
            parts = np.flatnonzero(plan.tile[tiles:] == tile)
            assert plan.first_extra[tile] == (parts[0] if len(parts) else extra)
            assert (plan.token_tile[token : token + places] == tile).all()
            assert plan.token_place[token : token + places].tolist() == list(range(places))
            seen = 0 if window is None else max(0, position - window + 1)
            assert sorted(blocks.pop(tile)) == list(range(seen // BLOCK, (position + places - 1) // BLOCK + 1))
            token += places
    assert not blocks
    assert (plan.token_tile[token:] == tiles).all()


@cache
def _plan(tile_tokens: int, extra: int, window: int | None):
    sizes = {"tokens": TOKENS, "tile_tokens": tile_tokens, "align": ALIGN, "block": BLOCK, "extra_parts": extra}
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(partial(make_plan, **sizes, sliding_window=window), compiler_options=options)


def test_a_long_context_gets_the_parts_that_there_are():
    """Catches: parts reserved for rows that do not need them."""
    start, lengths = np.arange(6, dtype=np.int32), np.array([3, 4000, 3, 3, 3], np.int32)
    sizes = {"tokens": 5, "tile_tokens": 1, "align": ALIGN, "block": BLOCK, "extra_parts": 7}
    plan = jax.jit(partial(make_plan, **sizes, sliding_window=None))(start, lengths)
    assert (np.asarray(plan.tile) == 1).sum() == 7  # the blocks of the short ones count as well
    assert (np.asarray(plan.end) - np.asarray(plan.begin)).max() == -(-1004 // 7)
