"""Taking pages and giving them back. Nobody uses a page whose reference count is 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jpaged.step.sharing.index import spread


def page_at(page_table: jax.Array, column: jax.Array) -> jax.Array:
    """The page `[N]` at `column` `[N]` of each table `[N, M]`; past the end the last one, which nobody should use."""
    column = jnp.clip(column, 0, page_table.shape[1] - 1)
    return jnp.take_along_axis(page_table, column[:, None], axis=1)[:, 0]


def release(refcount: jax.Array, page_table: jax.Array, begin: jax.Array, end: jax.Array) -> jax.Array:
    """Reference counts `[P]` after the slots dropped the pages of the columns from `begin` `[S]` up to before `end`
    `[S]` of their tables."""
    column = jnp.arange(page_table.shape[1], dtype=jnp.int32)
    dropped = (column >= begin[:, None]) & (column < end[:, None])
    # An index past the end is dropped.
    return refcount.at[jnp.where(dropped, page_table, refcount.shape[0])].add(-1, mode="drop")


def take(
    refcount: jax.Array, page_table: jax.Array, num_pages: jax.Array, need: jax.Array, pages: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Appends `need[s]` of `pages` to the table of each slot, slot after slot.

    Args:
        refcount: `[P]`.
        page_table, num_pages: `[S, M]` and `[S]`.
        need: `[S]` int32.
        pages: `[most]` int32, in the order in which they are taken; nobody may use the first `sum(need)` of them.

    Returns:
        The new `refcount`, `page_table` and `num_pages`.
    """
    slots = page_table.shape[0]
    runs = spread(need, pages.shape[0])
    column = num_pages[runs.owner] + runs.number
    page_table = page_table.at[jnp.where(runs.used, runs.owner, slots), column].set(pages, mode="drop")
    refcount = refcount.at[jnp.where(runs.used, pages, refcount.shape[0])].add(1, mode="drop")
    return refcount, page_table, num_pages + need
