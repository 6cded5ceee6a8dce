"""Writes new keys and values into their pages, in place where the caller donates the pages."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.kv_write.xla import kv_write_xla

IMPLEMENTATIONS = (Implementation("xla", kv_write_xla),)


def kv_write(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: int | jax.Array,
    page: jax.Array,
    offset: jax.Array,
    *,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Puts token `t` of `k` and `v` at `[layer, page[t], :, offset[t]]`.

    Args:
        k_pages, v_pages: `[layers, pages, kv_heads, page_size, head_dim]`.
        k, v: `[tokens, kv_heads, head_dim]`, in the dtype of the pages.
        layer: the layer to write.
        page, offset: `[tokens]` int32. Padding names the scratch page; several tokens may name the same place only
            there, where it does not matter which one stays.

    Raises:
        ValueError: for shapes or dtypes that do not belong together, naming them.
    """
    kv_heads, _, head_dim = k_pages.shape[2:]
    tokens = page.shape[0]
    if k.shape != (tokens, kv_heads, head_dim) or v.shape != k.shape or offset.shape != page.shape:
        raise ValueError(
            f"k {k.shape} and v {v.shape} must be [tokens, kv_heads, head_dim] = {(tokens, kv_heads, head_dim)}, "
            f"page {page.shape} and offset {offset.shape} [tokens]"
        )
    if not k.dtype == v.dtype == k_pages.dtype == v_pages.dtype:
        raise ValueError(f"k is {k.dtype}, v {v.dtype}, the pages are {k_pages.dtype} and {v_pages.dtype}")
    function = choose("kv_write", IMPLEMENTATIONS, implementation)
    return function(k_pages, v_pages, k, v, layer, page, offset)
