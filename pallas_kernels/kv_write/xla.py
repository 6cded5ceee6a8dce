"""Writing keys and values as one scatter a side. It is also the specification."""

from __future__ import annotations


def kv_write_xla(k_pages, v_pages, k, v, layer, page, offset):
    """See `kv_write`."""
    return (
        k_pages.at[layer, page, :, offset].set(k, mode="promise_in_bounds"),
        v_pages.at[layer, page, :, offset].set(v, mode="promise_in_bounds"),
    )
