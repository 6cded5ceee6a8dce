"""What a step decided about slots and pages, where the engine keeps a trace: small lists beside the counts that every
record has.

    preempt   requests that lost a slot              enter   pages of others taken in place of equal ones of its own,
    admit     pages found computed already           attach  and those that others have just computed
    schedule  new pages

They are read off the page tables between the parts of the step, so that a part need not know of the trace: a page that
a slot names after a part, and did not name before it at that place, is one that it got there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from jpaged.pool import SCRATCH_PAGE
from jpaged.step.sharing.index import LOOKUP_PAGES
from jpaged.step.status import NO_REQUEST


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Placed:
    """Pages that slots got, slot after slot and column after column; the first `count` of N entries. On the host, where
    `jpaged.record.trace` keeps them, there are no others."""

    page: jax.Array  # [N] int32; SCRATCH_PAGE where unused
    slot: jax.Array  # [N] int32
    column: jax.Array  # [N] int32, place in the slot's table
    count: jax.Array  # [] int32; more than N would mean that entries are missing, and no step gives that many

    @classmethod
    def empty(cls, most: int) -> Placed:
        ints = jnp.zeros(most, jnp.int32)
        return cls(page=ints, slot=ints, column=ints, count=jnp.int32(0))

    @property
    def most(self) -> int:
        """N"""
        return self.page.shape[0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decisions:
    """Of one step. A request that ended (`StepRecord.finish`) leaves its slot before the next."""

    preempted: jax.Array  # [S] int32, the request that lost this slot to make room; NO_REQUEST: none
    kept: jax.Array  # [S] int32, pages left in its table after eviction and preemption
    restored: Placed  # of requests resumed with pages of the host, before the step; see `exchange`
    found: Placed  # computed already, of requests that were admitted; a fork's of its parent
    taken: Placed  # new, to compute into
    shared: Placed  # computed by others, of running requests: in place of an equal page of its own, or after its last
    cached: jax.Array  # [ceil(P / 8)] uint8, a bit for each page: whether others can find what it holds now

    @classmethod
    def empty(
        cls, *, slots: int, columns: int, num_pages: int, page_size: int, most_tokens: int, most_restored: int
    ) -> Decisions:
        """None yet, with room for those of steps of at most `most_tokens` tokens."""
        found = min(slots * columns, max(columns, LOOKUP_PAGES))
        begun = slots + most_tokens // page_size
        return cls(
            preempted=jnp.full(slots, NO_REQUEST, jnp.int32), kept=jnp.zeros(slots, jnp.int32),
            restored=Placed.empty(most_restored), found=Placed.empty(found), taken=Placed.empty(begun),
            shared=Placed.empty(min(slots * columns, found + begun)),
            cached=jnp.zeros(-(-(1 + num_pages) // 8), jnp.uint8),
        )  # fmt: skip


class Tables(Protocol):
    """The page tables of all slots, as `Slots` has them."""

    @property
    def page_table(self) -> jax.Array: ...  # [S, M] int32

    @property
    def num_pages(self) -> jax.Array: ...  # [S] int32


def placed(before: Tables, after: Tables, most: int) -> Placed:
    """The pages that the tables `after` name where those `before` it named another, or none."""
    slots, columns = after.page_table.shape
    column = jnp.arange(columns, dtype=jnp.int32)[None]
    new = (column >= before.num_pages[:, None]) | (after.page_table != before.page_table)
    new &= column < after.num_pages[:, None]
    place = jnp.nonzero(new.ravel(), size=most, fill_value=slots * columns)[0].astype(jnp.int32)
    page = after.page_table.ravel().at[place].get(mode="fill", fill_value=SCRATCH_PAGE)
    slot, column = jnp.divmod(jnp.where(page == SCRATCH_PAGE, 0, place), columns)
    return Placed(page=page, slot=slot, column=column, count=jnp.sum(new, dtype=jnp.int32))


def decided(
    last: Decisions,
    tables: Sequence[Tables],
    preempted: jax.Array,
    kept: jax.Array,
    restored: Placed | None,
    cached: jax.Array,
    most_pages: int,
) -> Decisions:
    """What a step decided.

    Args:
        last: what the one before it did, for its sizes.
        tables: those after preemption, admission, scheduling, and at the end.
        preempted, kept, restored: as in `Decisions`; None: there is no host pool.
        findable: `[P]` bool, at the end.
        most_pages: how many pages the step can begin.

    Raises:
        ValueError: for a step of more tokens than the record has room for.
    """
    if most_pages > last.taken.most:
        raise ValueError(
            f"a step that begins up to {most_pages} pages does not fit in this state's trace, which has room for "
            f"{last.taken.most}: make the state with a larger max_num_batched_tokens"
        )
    found, taken, shared = (
        placed(before, after, lists.most)
        for before, after, lists in zip(tables[:-1], tables[1:], (last.found, last.taken, last.shared), strict=True)
    )
    return Decisions(preempted, kept, restored or Placed.empty(0), found, taken, shared, jnp.packbits(cached))
