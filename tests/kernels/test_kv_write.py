"""Writing keys and values: the right place, nothing else, in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_write
from pallas_kernels.kv_write.api import IMPLEMENTATIONS
from pallas_kernels.kv_write.cases import CASES, Case

LAYERS, LAYER, SCRATCH = 3, 1, 0
NAMES = [i.name for i in IMPLEMENTATIONS if not i.platforms or "cpu" in i.platforms]


def inputs(case: Case, dtype=np.float32):
    rng = np.random.default_rng(0)
    last = case.start + case.tokens
    pages = -(-last // case.page_size)
    order = (1 + rng.permutation(pages + 1)).astype(np.int32)
    shape = (LAYERS, pages + 2, case.kv_heads, case.page_size, case.head_dim)
    k_pages, v_pages = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    place = np.arange(case.start, last)
    page = np.concatenate([order[place // case.page_size], np.full(case.padding, SCRATCH)]).astype(np.int32)
    offset = np.concatenate([place % case.page_size, np.zeros(case.padding)]).astype(np.int32)
    new = (case.tokens + case.padding, case.kv_heads, case.head_dim)
    k, v = (jnp.asarray(rng.normal(size=new), dtype) for _ in range(2))
    return k_pages, v_pages, k, v, LAYER, jnp.asarray(page), jnp.asarray(offset)


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("name", CASES)
def test_every_case(name, implementation):
    """Catches: keys and values exchanged, heads and tokens transposed, a neighbour, another layer or another page
    touched."""
    case = CASES[name]
    k_pages, v_pages, k, v, layer, page, offset = inputs(case)
    expected = [np.array(k_pages), np.array(v_pages)]
    for token in range(case.tokens):
        for pool, new in zip(expected, (k, v), strict=True):
            pool[layer, page[token], :, offset[token]] = new[token]
    written = jax.jit(lambda *a: kv_write(*a, implementation=implementation))(
        k_pages, v_pages, k, v, layer, page, offset
    )
    for result, pool in zip(written, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(result)[:, 1:], pool[:, 1:])
        others = [n for n in range(LAYERS) if n != layer]
        np.testing.assert_array_equal(np.asarray(result)[others], pool[others])


@pytest.mark.parametrize("name", ["page16", "padding"])
def test_the_pool_is_written_in_place(name):
    """Catches: a write that copies the pool. The donated pages are the result, and a pool a hundred times as large
    needs no more temporary bytes."""
    k_pages, _, k, v, layer, page, offset = inputs(CASES[name])
    temporary = []
    for factor in (100, 200):
        shape = (k_pages.shape[0], factor * k_pages.shape[1], *k_pages.shape[2:])
        pool = jax.ShapeDtypeStruct(shape, k_pages.dtype)
        compiled = jax.jit(kv_write, donate_argnums=(0, 1)).lower(pool, pool, k, v, layer, page, offset).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == 2 * np.prod(shape) * 4
        temporary.append(memory.temp_size_in_bytes)
    assert temporary[0] == temporary[1] < 16 * k.nbytes + 4096


def test_shapes_and_dtypes_that_do_not_belong_together_are_named():
    """Catches: a silent cast of the keys, a scatter that broadcasts."""
    k_pages, v_pages, k, v, layer, page, offset = inputs(CASES["page4"])
    with pytest.raises(ValueError, match="bfloat16, v float32, the pages are float32"):
        kv_write(k_pages, v_pages, k.astype(jnp.bfloat16), v, layer, page, offset)
    with pytest.raises(ValueError, match=r"k \(9, 1, 16\)"):
        kv_write(k_pages, v_pages, k[:, :1], v[:, :1], layer, page, offset)
    with pytest.raises(ValueError, match=r"page \(9,\) and offset \(8,\)"):
        kv_write(k_pages, v_pages, k, v, layer, page, offset[:-1])
    with pytest.raises(ValueError, match="no implementation"):
        kv_write(k_pages, v_pages, k, v, layer, page, offset, implementation="fast")
