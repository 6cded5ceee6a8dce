"""Attention of `numba_cpu` as JAX calls it. Imports numba only where its code is not kept, see `cpu.native`."""

from __future__ import annotations

import os
import sys
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu import native
from pallas_kernels.cpu.units import LANES

#: Queries in a tile, and keys in a chunk: the scores of 16 queries, the keys and the result stay in a core's cache.
TILE = 16
CHUNK = 64
#: Rows and columns of the block of a product that is kept in registers: 8 of 16 that AVX has, two for a row of the
#: right factor, one for a number of the left.
BLOCK_ROWS, BLOCK_COLUMNS = 4, 2 * LANES


def round_up(value, multiple):
    """The smallest multiple that is not less than `value`. Also compiled by numba."""
    return (value + multiple - 1) // multiple * multiple


def memory(tile_rows, heads, head_dim):
    """How many floats a thread needs for `tile_rows` rows of scores a head."""
    padded = round_up(tile_rows, BLOCK_ROWS)
    return heads * padded * (2 * head_dim + 2) + (padded + head_dim) * CHUNK + 2 * (CHUNK + head_dim)


_NAME = "jpaged_paged_attention"


def _object_file() -> bytes:
    from pallas_kernels.paged_attention.numba_cpu import object_file  # numba, only where it has something to compile

    return object_file(_NAME)


@cache
def _register() -> object:
    """Makes the operation known to XLA, once; what comes back is its code, which is to be kept."""
    here = Path(__file__).parent
    sources = (*(here.parent / "cpu").glob("*.py"), here / "numba_cpu.py", here / "numba_call.py")
    return native.register(_NAME, _object_file, sorted(sources))


def missing(queries: jax.Array, k_pages: jax.Array, return_lse: bool) -> str | None:
    """Why these operands cannot be computed here, as the end of a sentence; None if they can."""
    if sys.platform == "win32":
        return "it needs a POSIX system"
    if not queries.dtype == k_pages.dtype == jnp.float32:
        return f"it computes in float32, and queries are {queries.dtype}, pages {k_pages.dtype}"
    if k_pages.shape[4] % BLOCK_COLUMNS:
        return f"head_dim must be a multiple of {BLOCK_COLUMNS}, and is {k_pages.shape[4]}"
    if return_lse:
        return "it does not return the log-sum-exp"
    return None


# Traced once for all layers of a model: the layer is an operand.
@partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap"))
def paged_attention_numba(
    queries, k_pages, v_pages, layer, page_table, query_start, kv_len, *, scale, sliding_window=None, soft_cap=None
) -> jax.Array:
    """See `paged_attention`. Temporary memory is that of one tile a thread."""
    heads, head_dim = queries.shape[1:]
    kv_heads = k_pages.shape[2]
    shared = heads // kv_heads
    floats = max(memory(TILE * shared, 1, head_dim), memory(shared, kv_heads, head_dim))
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    _register()
    call = jax.ffi.ffi_call(
        _NAME,
        (
            jax.ShapeDtypeStruct(queries.shape, jnp.float32),
            jax.ShapeDtypeStruct((workers, round_up(floats, 16)), jnp.float32),  # cache lines of their own
        ),
        vmap_method="sequential",
    )
    out, _ = call(
        queries, k_pages, v_pages, page_table, query_start, kv_len, jnp.int32(layer),
        scale=np.float32(scale), soft_cap=np.float32(soft_cap or 0), window=np.int32(sliding_window or 0),
    )  # fmt: skip
    return out
