"""Attention over a paged KV cache, for JAX. Imports jax only; usable without the rest of jpaged.

    from pallas_kernels import paged_attention, kv_write

`pallas_kernels.paged_attention` says what the arrays are; `pallas_kernels.dispatch` how an implementation is chosen.
"""

from pallas_kernels.kv_write.api import kv_write
from pallas_kernels.paged_attention.api import paged_attention

__all__ = ["kv_write", "paged_attention"]
