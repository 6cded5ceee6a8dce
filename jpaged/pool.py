"""What the step and the models share: the pool, the batch of one forward pass, and the decoder's call.

`step/` and `models/` meet only here, so that a stub decoder can drive the engine and a model can be run without
the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

#: The page that padding is written to. It is never read; requests own pages 1 to num_pages.
SCRATCH_PAGE = 0
#: Pages that are moved between the pool and the host together.
CHUNK_PAGES = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPool:
    """Keys and values of every page in every layer.

    A page holds, for each KV head, `page_size` consecutive tokens as rows of `head_dim`:

        k[layer, page]:  kv_head 0: token 0 [head_dim], token 1 [head_dim], ...
                         kv_head 1: token 0 [head_dim], ...

    so that the tokens a query tile reads for one KV head are one contiguous block.
    """

    k: jax.Array  # [layers, 1 + num_pages, kv_heads, page_size, head_dim]
    v: jax.Array  # [layers, 1 + num_pages, kv_heads, page_size, head_dim]

    @classmethod
    def zeros(cls, *, layers: int, num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype) -> KVPool:
        shape = (layers, 1 + num_pages, kv_heads, page_size, head_dim)
        return cls(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))

    def copy(self, source: jax.Array, target: jax.Array) -> KVPool:
        """What is in the pages `source` `[N]` is in the pages `target` `[N]` as well; all are read before any is
        written."""
        return KVPool(*(pages.at[:, target].set(pages[:, source]) for pages in (self.k, self.v)))

    def read(self, pages: jax.Array) -> KVPool:
        """What is in `pages` `[N]`, as a pool of N pages."""
        return jax.tree.map(lambda array: array[:, pages], self)

    def write(self, pages: jax.Array, chunk: KVPool) -> KVPool:
        """With `chunk`, of `read`, in `pages` `[N]`; nothing where that is 1 + num_pages."""
        return jax.tree.map(lambda array, new: array.at[:, pages].set(new, mode="drop"), self, chunk)

    @property
    def num_pages(self) -> int:
        """Pages that requests can own: all but the scratch page."""
        return self.k.shape[1] - 1

    @property
    def page_size(self) -> int:
        return self.k.shape[3]

    @property
    def page_bytes(self) -> int:
        """Of a page, in all layers."""
        return self.nbytes // self.k.shape[1]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepBatch:
    """The tokens of one forward pass, packed: row after row, without gaps, padding last.

    A row is one request's part of this pass. Its `query_start[r+1] - query_start[r]` tokens are the last of its
    `kv_len[r]` tokens; the earlier ones are in the pool. Padding rows have no tokens and `kv_len` 0. Padding
    tokens have `token_row == rows`, and their keys go to the scratch page.
    """

    token_ids: jax.Array  # [tokens] int32
    positions: jax.Array  # [tokens] int32, place in the request; 0 for padding
    token_row: jax.Array  # [tokens] int32, the row of the token; `rows` for padding
    query_start: jax.Array  # [rows + 1] int32, offsets into the packed tokens
    kv_len: jax.Array  # [rows] int32, tokens of the request after this pass; 0 for a padding row
    page_table: jax.Array  # [rows, max_pages] int32, pages in order; SCRATCH_PAGE where unused
    logit_index: jax.Array  # [rows] int32, the packed token whose logits are wanted: in the step, the row's last

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.kv_len.shape[0]


class Decoder(Protocol):
    """A model as the step sees it: hashable, static; its weights are the `params` pytree."""

    def __call__(self, params: Any, pool: KVPool, batch: StepBatch) -> tuple[jax.Array, KVPool]:
        """Writes the batch's keys and values into the pool and returns float32 logits `[rows, vocab]`
        of the tokens `batch.logit_index`, and the pool."""
        ...
