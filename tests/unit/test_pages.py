"""Taking pages and giving them back, by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.examples import at_least

from jpaged.pool import SCRATCH_PAGE
from jpaged.step.pages import release, take

SLOTS, COLUMNS, PAGES, MOST = 4, 5, 16, 12
jit_release = jax.jit(release)


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


def test_release_drops_one_reference_of_each_page_in_those_columns():
    """Catches: a scratch entry past the end that loses a reference; a shared page freed under its other owner; one that
    is kept and counted as given back."""
    table = jnp.array([[1, 2, 0, 0, 0], [1, 3, 4, 0, 0], [5, 0, 0, 0, 0], [0] * 5], jnp.int32)
    held = jnp.array([2, 3, 1, 0], jnp.int32)
    refcount = jnp.array([1, 2, 1, 1, 1, 1] + [0] * 10, jnp.int32)
    after = jit_release(refcount, table, jnp.array([0, 3, 0, 0], jnp.int32), held)
    assert after.tolist() == [1, 1, 0, 1, 1, 0] + [0] * 10
    after = jit_release(refcount, table, jnp.array([1, 2, 1, 0], jnp.int32), held)
    assert after.tolist() == [1, 2, 0, 1, 0, 1] + [0] * 10
    assert jit_release(refcount, table, held, held).tolist() == refcount.tolist()


@at_least(60)
@given(data=st.data())
def test_taking_and_releasing_keeps_the_count(data):
    """PC-06, for the two functions alone: after any sequence, reference counts are what the tables say."""
    refcount = jnp.zeros(PAGES, jnp.int32).at[SCRATCH_PAGE].set(1)
    table, held = jnp.zeros((SLOTS, COLUMNS), jnp.int32), jnp.zeros(SLOTS, jnp.int32)
    for _ in range(data.draw(st.integers(1, 6))):
        left, need = min(MOST, int(jnp.sum(refcount == 0))), []
        for count in np.asarray(held):
            need.append(data.draw(st.integers(0, min(left, COLUMNS - int(count)))))
            left -= need[-1]
        refcount, table, held = jit_take(refcount, table, held, jnp.array(need, jnp.int32))
        which = jnp.array(data.draw(st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS)))
        kept = jnp.where(which, held // 2, held)
        refcount = jit_release(refcount, table, kept, held)
        held = kept
        table = jnp.where(jnp.arange(COLUMNS) < held[:, None], table, SCRATCH_PAGE)
        named = np.zeros(PAGES, int)
        named[SCRATCH_PAGE] = 1
        for slot in range(SLOTS):
            np.add.at(named, np.asarray(table)[slot, : int(held[slot])], 1)
        assert refcount.tolist() == named.tolist()
        assert named[1:].max() <= 1
