"""Taking pages and giving them back. A page is free where its reference count is 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jpaged.pool import SCRATCH_PAGE


def release(refcount: jax.Array, page_table: jax.Array, num_pages: jax.Array, which: jax.Array) -> jax.Array:
    """Reference counts `[P]` after the slots of `which` `[S] bool` dropped the pages in their tables."""
    column = jnp.arange(page_table.shape[1], dtype=jnp.int32)
    named = which[:, None] & (column < num_pages[:, None])
    # An index past the end is dropped.
    return refcount.at[jnp.where(named, page_table, refcount.shape[0])].add(-1, mode="drop")


def take(
    refcount: jax.Array, page_table: jax.Array, num_pages: jax.Array, need: jax.Array, most: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Appends `need[s]` free pages to the table of each slot, lowest page first.

    Args:
        refcount: `[P]`. There must be `sum(need)` free pages.
        page_table, num_pages: `[S, M]` and `[S]`.
        need: `[S]` int32.
        most: what `sum(need)` cannot exceed; a static shape.

    Returns:
        The new `refcount`, `page_table` and `num_pages`.
    """
    slots = page_table.shape[0]
    free = jnp.nonzero(refcount == 0, size=most, fill_value=SCRATCH_PAGE)[0].astype(jnp.int32)
    end = jnp.cumsum(need, dtype=jnp.int32)
    taken = jnp.arange(most, dtype=jnp.int32)
    used = taken < end[-1]
    # The i-th page goes to the slot whose share ends after i.
    owner = jnp.minimum(jnp.sum(taken[:, None] >= end, axis=1, dtype=jnp.int32), slots - 1)
    column = num_pages[owner] + taken - (end - need)[owner]
    page_table = page_table.at[jnp.where(used, owner, slots), column].set(free, mode="drop")
    refcount = refcount.at[jnp.where(used, free, refcount.shape[0])].add(1, mode="drop")
    return refcount, page_table, num_pages + need
