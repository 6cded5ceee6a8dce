"""Which slots hold which pages: taking pages, sharing them, and giving them back.

Beside the tables the state has a bit for each slot and page: `holders`. With it, a slot gives back all of its pages at
once, whatever the length of its table, and a page knows which of the slots hold it. What is done to all tables in a
step would cost what requests could have; this costs what there are of pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from jpaged.step.sharing.index import forget, next_to_take, spread
from jpaged.step.state import EngineState, Slots

_WORD = 32


def bits_of(which: jax.Array) -> jax.Array:
    """The bits `[..., W]` of the slots `which` `[..., S]` bool."""
    words = -(-which.shape[-1] // _WORD)
    padded = jnp.pad(which, [(0, 0)] * (which.ndim - 1) + [(0, words * _WORD - which.shape[-1])])
    place = jnp.arange(_WORD, dtype=jnp.uint32)
    bits = padded.reshape(*which.shape[:-1], words, _WORD).astype(jnp.uint32)
    return jnp.sum(bits << place.reshape((1,) * which.ndim + (_WORD,)), axis=-1, dtype=jnp.uint32)


def change(holders: jax.Array, page: jax.Array, slot: jax.Array, used: jax.Array, *, holds: bool) -> jax.Array:
    """After slot `slot[n]` took page `page[n]` `[N]` into its table, or out of it, where `used` `[N]` bool. Each pair
    stands there once; a page is added only where it is absent, and removed only where it is present."""
    bit = jnp.uint32(1) << (slot % _WORD).astype(jnp.uint32)
    word = jnp.where(used, slot // _WORD, holders.shape[0])
    return holders.at[word, page].add(bit if holds else jnp.uint32(0) - bit, mode="drop")


def from_column(begin: jax.Array, column: jax.Array, columns: int) -> jax.Array:
    """The bits `[W, P]` of the slots for which each page is at `begin` `[S]` of their tables or after it; `columns` for
    none. A page is at one column, `column` `[P]`, of all tables that name it."""
    slot = jnp.arange(begin.shape[0], dtype=jnp.int32)
    starts = jnp.zeros((-(-begin.shape[0] // _WORD), columns + 1), jnp.uint32)
    starts = change(starts, begin, slot, begin < columns, holds=True)
    return jnp.cumsum(starts, axis=1, dtype=jnp.uint32)[:, column]


def give_back(holders: jax.Array, refcount: jax.Array, dropped: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Holders and reference counts after slots dropped pages, `dropped` `[W, P]` or `[W, 1]` by their bits."""
    gone = jax.lax.population_count(holders & dropped)
    return holders & ~dropped, refcount - jnp.sum(gone, axis=0, dtype=jnp.int32)


def leading(slots: Slots, good: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """How many pages `[S]` at the head of each table are good. `good` says it of a page of each slot, `[S]` to `[S]`
    bool, and of no page after one that is not: what others hold too, as tables share heads and nothing else."""
    slot = jnp.arange(slots.num_slots, dtype=jnp.int32)
    columns = slots.page_table.shape[1]
    low, high = jnp.zeros_like(slots.num_pages), slots.num_pages
    for _ in range(columns.bit_length()):
        middle = (low + high) // 2
        page = slots.page_table[slot, jnp.minimum(middle, columns - 1)]
        passes = (low < high) & good(page)
        low, high = jnp.where(passes, middle + 1, low), jnp.where(passes, high, middle)
    return low


def page_at(page_table: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """The page `[N]` at `column` `[N]` of table `row` `[N]`; past the end the last one, which nothing may use."""
    return page_table[row, jnp.clip(column, 0, page_table.shape[1] - 1)]


def take(
    refcount: jax.Array, page_table: jax.Array, num_pages: jax.Array, need: jax.Array, pages: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Appends `need[s]` of `pages` to the table of each slot, slot after slot.

    Args:
        refcount: `[P]`.
        page_table, num_pages: `[S, M]` and `[S]`.
        need: `[S]` int32.
        pages: `[most]` int32, in the order in which they are taken; the first `sum(need)` of them must be unused.

    Returns:
        The new `refcount`, `page_table` and `num_pages`.
    """
    slots = page_table.shape[0]
    runs = spread(need, pages.shape[0])
    column = num_pages[runs.owner] + runs.number
    page_table = page_table.at[jnp.where(runs.used, runs.owner, slots), column].set(pages, mode="drop")
    refcount = refcount.at[jnp.where(runs.used, pages, refcount.shape[0])].add(1, mode="drop")
    return refcount, page_table, num_pages + need


def take_unused(state: EngineState, need: jax.Array, most: int) -> EngineState:
    """Appends `need[s]` `[S]` unused pages to the table of each slot, slot after slot, at most `most` in all. There
    must be as many. What they held is forgotten."""
    slots, prefixes = state.slots, state.prefixes
    pages = next_to_take(prefixes, state.refcount, state.counters.steps, slots.page_table.shape[1], most)
    refcount, page_table, num_pages = take(state.refcount, slots.page_table, slots.num_pages, need, pages)
    runs = spread(need, most)
    page = jnp.where(runs.used, pages, refcount.shape[0])  # past the end, which is dropped
    taken = jnp.zeros(refcount.shape, bool).at[page].set(True, mode="drop")
    column = slots.num_pages[runs.owner] + runs.number
    return replace(
        state,
        holders=change(state.holders, pages, runs.owner, runs.used, holds=True),
        refcount=refcount,
        prefixes=replace(forget(prefixes, taken), depth=prefixes.depth.at[page].set(column, mode="drop")),
        slots=replace(slots, page_table=page_table, num_pages=num_pages),
    )
