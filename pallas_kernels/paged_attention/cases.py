"""Shapes of ragged paged attention that tests and benchmarks run, one list for both.

A row is `(queries, tokens)`: that many queries, the last of that many tokens. Tests are small enough for a CPU; the
benchmark cases at the end have a serving batch's lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cards import Card


@dataclass(frozen=True)
class Case:
    """One call of `paged_attention`."""

    name: str
    rows: tuple[tuple[int, int], ...]  # (queries, tokens) of each row
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16
    sliding_window: int | None = None
    soft_cap: float | None = None
    padding: int = 0  # tokens at the end that belong to no row
    core: bool = False  # one of the few that together take every path of the GPU kernels, see `_CORE`

    @property
    def num_tokens(self) -> int:
        return sum(queries for queries, _ in self.rows) + self.padding

    @property
    def max_pages(self) -> int:
        """Columns of the page table: what the longest row needs, and one that no row uses."""
        return max(-(-tokens // self.page_size) for _, tokens in self.rows) + 1

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the call."""
        scale = self.head_dim**-0.5
        return {"scale": scale, "sliding_window": self.sliding_window, "soft_cap": self.soft_cap}

    def bytes_moved(self, itemsize: int) -> int:
        """The least that must move: what is visible of keys and values once, queries and outputs once."""
        tokens = sum(self._seen(queries, tokens) for queries, tokens in self.rows)
        used = self.num_tokens - self.padding
        return itemsize * self.head_dim * (2 * tokens * self.kv_heads + 2 * used * self.heads)

    @property
    def operations(self) -> int:
        """Multiplications and additions of the two products, over what each query sees."""
        window = self.sliding_window or max(tokens for _, tokens in self.rows)
        seen = sum(
            min(position + 1, window) for queries, tokens in self.rows for position in range(tokens - queries, tokens)
        )
        return 4 * seen * self.heads * self.head_dim

    def least_seconds(self, card: Card, itemsize: int = 2) -> float:
        """The time that `card` takes at least: for the bytes or for the operations, whichever is longer."""
        return max(self.bytes_moved(itemsize) / card.bytes_per_s, self.operations / card.flops_per_s)

    def _seen(self, queries: int, tokens: int) -> int:
        """Tokens of a row that any of its queries sees."""
        return tokens if self.sliding_window is None else min(tokens, queries + self.sliding_window - 1)

    @property
    def pages_used(self) -> int:
        return sum(-(-tokens // self.page_size) for _, tokens in self.rows)


LAYERS, LAYER = 2, 1  # of the pool of `operands`
SPARE_PAGES = 3  # the scratch page among them
POISON = (np.nan, np.inf, -np.inf)


def operands(case: Case, seed: int = 0, dtype: Any = np.float32) -> tuple[Any, ...]:
    """Arguments of `paged_attention`: pages in a mixed order, and poison wherever no token of a row lies: in the
    ends of last pages, in pages that are free, in the other layer, in the scratch page."""
    rng = np.random.default_rng(seed)
    total = case.pages_used + SPARE_PAGES
    shape = (LAYERS, total, case.kv_heads, case.page_size, case.head_dim)
    k, v = (rng.choice(POISON, shape).astype(np.float32) for _ in range(2))
    table, start, lengths = integers(case, seed)
    for row, (_, tokens) in enumerate(case.rows):
        for column in range(-(-tokens // case.page_size)):
            page = table[row, column]
            filled = min(case.page_size, tokens - column * case.page_size)
            for pool in (k, v):
                pool[LAYER, page, :, :filled] = rng.normal(size=(case.kv_heads, filled, case.head_dim))
    queries = rng.normal(size=(case.num_tokens, case.heads, case.head_dim))
    floats = (jnp.asarray(a, dtype) for a in (queries, k, v))
    return (*floats, LAYER, *(jnp.asarray(a) for a in (table, start, lengths)))


def integers(case: Case, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`page_table`, with pages in a mixed order from a pool with some to spare, `query_start` and `kv_len`."""
    order = 1 + np.random.default_rng(seed).permutation(case.pages_used + SPARE_PAGES - 1)
    table = np.zeros((len(case.rows), case.max_pages), np.int32)
    used = 0
    for row, (_, tokens) in enumerate(case.rows):
        count = -(-tokens // case.page_size)
        table[row, :count] = order[used : used + count]
        used += count
    start = np.cumsum([0, *(queries for queries, _ in case.rows)]).astype(np.int32)
    return table, start, np.array([tokens for _, tokens in case.rows], np.int32)


def _lengths(page: int) -> tuple[int, ...]:
    """Around the edges of one page and of two."""
    return tuple(sorted({1, page - 1, page, page + 1, 2 * page, 2 * page + 1} - {0}))


def _decode(page: int) -> tuple[tuple[int, int], ...]:
    return ((0, 0), *((1, n) for n in _lengths(page)))


def _mixed(page: int) -> tuple[tuple[int, int], ...]:
    """Decoding, whole prompts and later chunks, an idle row between them."""
    return ((1, page), (page + 1, page + 1), (0, 0), (3, 2 * page + 1), (1, 1), (17, 3 * page + 17))


#: of pages that are no multiple of 4 tokens: what a GPU's copies can take apart
_WIDE: dict[int, dict[str, Any]] = {1: {"head_dim": 64}, 3: {"head_dim": 64}}

_BLOCKS = (
    [Case(f"decode-page{p}", _decode(p), page_size=p, **_WIDE.get(p, {})) for p in (1, 4, 16, 64, 128, 256)]
    + [
        Case(f"mixed-page{p}", _mixed(p), page_size=p, padding=5, **_WIDE.get(p, {}))
        for p in (1, 3, 4, 16, 24, 64, 96, 128)
    ]
    + [Case(f"ratio{ratio}", _mixed(16), heads=2 * ratio) for ratio in (1, 3, 4, 6, 7, 8, 16)]
    + [Case(f"mqa{ratio}", _mixed(4), heads=ratio, kv_heads=1, page_size=4) for ratio in (1, 7)]
    + [Case(f"head_dim{size}", _mixed(16), head_dim=size) for size in (64, 80, 96, 112, 128, 256)]
    + [Case(f"head_dim{d}-page{p}", ((1, p), (p + 1, 7)), head_dim=d, page_size=p) for d, p in ((80, 2), (96, 3))]
    + [
        Case(f"window{window}-page{page}", _mixed(page), page_size=page, sliding_window=window, **_WIDE.get(page, {}))
        for page, window in ((1, 1), (4, 5), (16, 16), (16, 33), (128, 100))
    ]
    + [
        Case("soft_cap", _mixed(16), soft_cap=2.0),
        Case("soft_cap-window", _mixed(16), soft_cap=5.0, sliding_window=20),
        Case("window-over-blocks", ((40, 90), (1, 290), (0, 0)), sliding_window=5),
        Case("one-query", ((1, 1),)),
        Case("one-prompt", ((40, 40),)),
        Case("long-decode", ((1, 700), (1, 3))),
        Case("long-chunk", ((33, 300), (1, 290))),
        Case("idle", ((0, 0), (0, 0)), padding=8),
        Case("more-rows-than-tokens", (*((0, 0),) * 9, (1, 20), *((0, 0),) * 9, (2, 5)), padding=1),
        Case("many-rows", tuple((1, 1 + 7 * i % 90) for i in range(40)), page_size=4),
        Case("many-short-prompts", tuple((1 + i % 5, 1 + i % 5 + i) for i in range(24)), page_size=4),
    ]
)  # fmt: skip

#: The cases that take every path of the GPU kernels, and why each is one of them. Every CI run interprets these, a
#: whole run all of `CASES`. `tests/support/kernel_paths.py` lists the paths; `tests/kernels/test_core_cases.py` shows
#: that none is left out.
_CORE = {
    "decode-page1": "columns in one piece; tiles of 16 rows on Ampere; copies of less than a swizzled tile",
    "decode-page128": "pages larger than a block; stages that are used again on every card",
    "long-decode": "a context cut into parts beside one that is not",
    "mixed-page64": "two tiles side by side that both compute, and both meet the row's end; padding",
    "mqa7": "seven query heads, which no tile is aligned to; one KV head; a row of several tiles",
    "window100-page128": "a window that begins in a later block; a row of several tiles on every card",
    "window-over-blocks": "queries that see nothing of the first block of their tile",
    "soft_cap-window": "a soft cap",
    "head_dim96": "columns that 64 does not divide, swizzled rows of 64 bytes",
    "head_dim256": "two warpgroups that share a tile on Hopper; blocks of 32 keys on Ampere",
    "head_dim80-page2": "pages that only the kernel for Ampere can copy, on every card",
    "idle": "no part that sees a key; cores without a part",
}

CASES = {case.name: replace(case, core=case.name in _CORE) for case in _BLOCKS}

#: A serving batch of Llama 3.1 8B: decoding, decoding with long contexts, and with a prefill chunk beside it.
BENCHMARKS = {
    case.name: case
    for case in (
        Case("serve-decode", ((1, 1000),) * 64, heads=32, kv_heads=8, head_dim=128),
        Case("serve-decode-ragged", tuple((1, 64 * (1 + i)) for i in range(64)), heads=32, kv_heads=8, head_dim=128),
        Case("serve-mixed", (*((1, 1000),) * 63, (193, 4096)), heads=32, kv_heads=8, head_dim=128),
        Case("serve-prefill", ((256, 256),) * 4, heads=32, kv_heads=8, head_dim=128),
        Case("serve-long-prefill", ((2048, 8192),), heads=32, kv_heads=8, head_dim=128),
        *(
            Case(f"decode-{batch}x{context}", ((1, context),) * batch, heads=32, kv_heads=8, head_dim=128)
            for batch in (1, 8, 64, 256)
            for context in (512, 2048, 8192, 32_768)
            if batch * context <= 64 * 32_768
        ),
    )
}
