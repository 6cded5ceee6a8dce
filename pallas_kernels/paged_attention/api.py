"""Ragged paged attention: the queries of many requests, packed, against keys and values in pages.

One call serves prefill chunks, decoding, and any mix of them. Row `r` is one request's part of the batch: the
packed queries `query_start[r] : query_start[r + 1]`, which are the last of its `kv_len[r]` tokens. A query at
position `p` of its request attends to the keys at positions `0 .. p` of the same request (with a sliding window,
to the last `sliding_window` of them).

            query_start   0        5 6    8                     packed queries, row after row
                          |aaaaaaaa|b|cccc|........             (row a: a prefill chunk, b: one decoding step)

            page_table    a: 7 2 9 -      kv_len  a: 37         keys of row a: pages 7, 2 and 9, in order
                          b: 4 - - -              b: 12

Pages are described by `jpaged.pool.KVPool`: `[layers, pages, kv_heads, page_size, head_dim]`; the whole layered
pool is passed with a layer index, so that no layer is ever copied out.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, overload

import jax

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.paged_attention.mosaic_gpu import missing as missing_for_mosaic_gpu
from pallas_kernels.paged_attention.mosaic_gpu import paged_attention_mosaic_gpu
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.xla import paged_attention_xla


# Kernels are imported where they are used: another platform needs none of what they import.
def _numba(*operands, return_lse, **options) -> jax.Array:
    from pallas_kernels.paged_attention.numba_call import paged_attention_numba

    return paged_attention_numba(*operands, **options)


def _missing_for_numba(queries: jax.Array, k_pages: jax.Array, return_lse: bool) -> str | None:
    if find_spec("numba") is None:
        return "numba is not installed (pip install numba)"
    from pallas_kernels.paged_attention.numba_call import missing

    return missing(queries, k_pages, return_lse)


IMPLEMENTATIONS = (
    Implementation("numba", _numba, ("cpu",), _missing_for_numba),
    Implementation("mosaic_gpu", paged_attention_mosaic_gpu, ("gpu",), missing_for_mosaic_gpu),
    Implementation("xla", paged_attention_xla),
    Implementation("reference", paged_attention_reference),
)


@overload
def paged_attention(
    queries: jax.Array, k_pages: jax.Array, v_pages: jax.Array, layer: int | jax.Array, page_table: jax.Array,
    query_start: jax.Array, kv_len: jax.Array, *, scale: float, sliding_window: int | None = None,
    soft_cap: float | None = None, return_lse: Literal[False] = False, implementation: str = "auto",
) -> jax.Array: ...  # fmt: skip
@overload
def paged_attention(
    queries: jax.Array, k_pages: jax.Array, v_pages: jax.Array, layer: int | jax.Array, page_table: jax.Array,
    query_start: jax.Array, kv_len: jax.Array, *, scale: float, sliding_window: int | None = None,
    soft_cap: float | None = None, return_lse: Literal[True], implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
def paged_attention(
    queries: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layer: int | jax.Array,
    page_table: jax.Array,
    query_start: jax.Array,
    kv_len: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    implementation: str = "auto",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of packed queries over paged keys and values.

    Args:
        queries: `[tokens, heads, head_dim]`; those past `query_start[-1]` are padding.
        k_pages, v_pages: `[layers, pages, kv_heads, page_size, head_dim]`, one dtype.
        layer: which layer's pages to read.
        page_table: `[rows, max_pages]` int32, the pages of each row in order. Entries past the row's last page
            are never read for their values, but must be valid indices.
        query_start: `[rows + 1]` int32, ascending from 0.
        kv_len: `[rows]` int32, tokens of the row including its queries; 0 for an idle row.
        scale: multiplies query-key products.
        sliding_window: how many tokens a query sees, itself included; None: all up to itself.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)` before the mask; None: as they are.
        return_lse: return the log-sum-exp of the scores as well, with which attention over parts of a context can be
            merged.
        implementation: a name of `IMPLEMENTATIONS`, or "auto".

    Returns:
        `[tokens, heads, head_dim]` in the dtype of `queries`; rows of padding are zero. Softmax is float32. With
        `return_lse` also `[tokens, heads]` float32, the natural logarithm; -inf for padding.

    Raises:
        ValueError: for shapes or dtypes that do not belong together, naming them.
    """
    _validate(queries, k_pages, v_pages, page_table, query_start, kv_len, sliding_window, soft_cap)
    function = choose("paged_attention", IMPLEMENTATIONS, implementation, operands=(queries, k_pages, return_lse))
    return function(
        queries, k_pages, v_pages, layer, page_table, query_start, kv_len,
        scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, return_lse=return_lse,
    )  # fmt: skip


def _validate(queries, k_pages, v_pages, page_table, query_start, kv_len, sliding_window, soft_cap):
    if queries.ndim != 3:
        raise ValueError(f"queries must be [tokens, heads, head_dim], got shape {queries.shape}")
    if k_pages.ndim != 5 or k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            "k_pages and v_pages must both be [layers, pages, kv_heads, page_size, head_dim] of one dtype, got "
            f"{k_pages.shape} {k_pages.dtype} and {v_pages.shape} {v_pages.dtype}"
        )
    heads, head_dim = queries.shape[1:]
    kv_heads = k_pages.shape[2]
    if k_pages.shape[4] != head_dim:
        raise ValueError(f"head_dim of queries ({head_dim}) and of pages ({k_pages.shape[4]}) differ")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    rows = kv_len.shape[0]
    if page_table.ndim != 2 or page_table.shape[0] != rows or query_start.shape != (rows + 1,):
        raise ValueError(
            f"page_table {page_table.shape}, query_start {query_start.shape} and kv_len {kv_len.shape} must be "
            "[rows, max_pages], [rows + 1] and [rows]"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 or None, got {sliding_window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive or None, got {soft_cap}")
