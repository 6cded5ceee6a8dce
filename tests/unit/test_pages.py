"""Taking pages and giving them back, by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import at_least

from jpaged.pool import SCRATCH_PAGE
from jpaged.step import Slots
from jpaged.step.pages import bits_of, change, from_column, give_back, leading, take

SLOTS, COLUMNS, PAGES, MOST = 4, 5, 16, 12


@jax.jit
def jit_take(refcount, table, held, need):
    """The lowest free page first."""
    free = jnp.nonzero(refcount == 0, size=MOST, fill_value=SCRATCH_PAGE)[0].astype(jnp.int32)
    return take(refcount, table, held, need, free)


def test_pages_are_appended_lowest_first_slot_after_slot():
    """Catches: a page given twice, or to the wrong column or slot."""
    refcount = jnp.zeros(PAGES, jnp.int32).at[jnp.array([0, 2, 3, 5])].set(1)
    table = jnp.zeros((SLOTS, COLUMNS), jnp.int32).at[0, :2].set(jnp.array([5, 3])).at[2, 0].set(2)
    held = jnp.array([2, 0, 1, 0], jnp.int32)
    need = jnp.array([1, 0, 2, 3], jnp.int32)
    refcount, table, held = jit_take(refcount, table, held, need)
    assert table.tolist() == [[5, 3, 1, 0, 0], [0, 0, 0, 0, 0], [2, 4, 6, 0, 0], [7, 8, 9, 0, 0]]
    assert held.tolist() == [3, 0, 3, 3]
    assert refcount.tolist() == [1] * 10 + [0] * 6


def test_taking_nothing_and_taking_all():
    """Catches: a page of the list that nobody asked for, which becomes somebody's."""
    refcount = jnp.zeros(PAGES, jnp.int32).at[SCRATCH_PAGE].set(1)
    table, held = jnp.zeros((SLOTS, COLUMNS), jnp.int32), jnp.zeros(SLOTS, jnp.int32)
    nothing = jit_take(refcount, table, held, jnp.zeros(SLOTS, jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, nothing, (refcount, table, held))
    need = jnp.array([5, 5, 2, 0], jnp.int32)
    refcount, table, _ = jit_take(refcount, table, held, need)
    assert refcount.tolist() == [1] * 13 + [0] * 3
    assert table.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 0, 0, 0], [0] * 5]


def held_by(tables: list[list[int]]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Holders, reference counts and the columns of pages, of these tables."""
    holders, column = np.zeros((1, PAGES), np.uint32), np.zeros(PAGES, np.int32)
    for slot, pages in enumerate(tables):
        for place, page in enumerate(pages):
            holders[0, page] |= 1 << slot
            column[page] = place
    refcount = np.array([bin(bits).count("1") for bits in holders[0].tolist()], np.int32)
    refcount[SCRATCH_PAGE] = 1
    return jnp.array(holders), jnp.array(refcount), jnp.array(column)


#: Tables that share their heads.
SHARING = [[1, 2], [1, 3, 4], [5], []]


@pytest.mark.parametrize(
    ("begin", "kept"),
    [
        ([0, 5, 0, 0], [[], [1, 3, 4], [], []]),
        ([1, 2, 1, 0], [[1], [1, 3], [5], []]),
        ([5, 5, 5, 5], SHARING),
        ([0, 0, 0, 0], [[], [], [], []]),
    ],
)
def test_pages_are_given_back_from_a_column_on(begin, kept):
    """Catches: a scratch page that loses a reference; a shared page freed under its other owner; one that is kept and
    counted as given back."""
    holders, refcount, column = held_by(SHARING)
    dropped = from_column(jnp.array(begin, jnp.int32), column, COLUMNS)
    holders, refcount = give_back(holders, refcount, dropped)
    expected = held_by(kept)
    assert holders.tolist() == expected[0].tolist() and refcount.tolist() == expected[1].tolist()


@at_least(12)
@given(data=st.data())
def test_taking_and_giving_back_keeps_the_count(data):
    """PC-06: after any sequence, reference counts are what the tables say, and so is whose pages they are; also where
    slots are more than a word has bits. What comes back if the last slots go is what no other of them holds."""
    slots = data.draw(st.sampled_from([SLOTS, 35]))
    tables = [data.draw(st.sampled_from(SHARING)) for _ in range(slots)]
    holders, refcount = jnp.zeros((-(-slots // 32), PAGES), jnp.uint32), jnp.zeros(PAGES, jnp.int32)
    for slot, pages in enumerate(tables):
        page, one = jnp.array([*pages, 0], jnp.int32), jnp.full(len(pages) + 1, slot, jnp.int32)
        used = jnp.arange(len(pages) + 1) < len(pages)
        holders = change(holders, page, one, used, holds=True)
        refcount = refcount.at[jnp.where(used, page, PAGES)].add(1, mode="drop")
    assert (
        refcount.tolist()
        == np.bincount(np.array([page for pages in tables for page in pages], int), minlength=PAGES).tolist()
    )
    which = np.array(data.draw(st.lists(st.booleans(), min_size=slots, max_size=slots)))
    _, refcount = give_back(holders, refcount, bits_of(jnp.array(which))[:, None])
    left = [page for pages, gone in zip(tables, which, strict=True) if not gone for page in pages]
    assert refcount.tolist() == np.bincount(np.array(left, int), minlength=PAGES).tolist()
    table = np.zeros((slots, COLUMNS), np.int32)
    for slot, pages in enumerate(tables):
        table[slot, : len(pages)] = pages
    nothing, count = jnp.zeros(slots, jnp.int32), jnp.array([len(pages) for pages in tables], jnp.int32)
    running = Slots(nothing > 0, nothing, nothing, nothing, count, jnp.array(table))
    bits = bits_of(jnp.array(~which))
    heads = leading(running, lambda page: jnp.any(holders[:, page] & bits[:, None] != 0, axis=0))
    assert heads.tolist() == [len([page for page in pages if page in left]) for pages in tables]
