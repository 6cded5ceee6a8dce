"""A decoder run by hand over pages: rows are fed any number of tokens at a time, without a scheduler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.models.decoder import ModelDecoder
from jpaged.pool import KVPool, StepBatch


class PagedRows:
    """Sequences with pages in a mixed order, in a pool whose unused slots are NaN.

    Args:
        budget: tokens of each pass, padding included: one compiled program.
        call: the decoder under `jax.jit`.
    """

    def __init__(
        self, decoder: ModelDecoder, params: Any, rows: int, *, page_size: int, max_len: int, budget: int, call: Any
    ):
        config = decoder.config
        self.params, self.call, self.budget, self.page_size = params, call, budget, page_size
        self.vocab = config.vocab_size
        columns = math.ceil(max_len / page_size)
        pool = KVPool.zeros(
            layers=config.num_layers, num_pages=rows * columns, kv_heads=config.num_kv_heads, page_size=page_size,
            head_dim=config.head_dim, dtype=jnp.float32,
        )  # fmt: skip
        self.pool = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), pool)
        pages = 1 + np.random.default_rng(0).permutation(rows * columns)
        self.table = pages.reshape(rows, columns).astype(np.int32)
        self.num_computed_tokens = np.zeros(rows, np.int32)

    def feed(self, given: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Computes the next tokens of each row (none is allowed); returns logits `[count, vocab]` of each row's."""
        rows, counts = len(self.table), np.array([len(tokens) for tokens in given], np.int32)
        total = int(counts.sum())
        assert total <= self.budget
        flat = np.zeros((3, self.budget), np.int32)
        flat[2] = rows  # padding
        start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        for row, tokens in enumerate(given):
            place = slice(start[row], start[row + 1])
            flat[0, place], flat[2, place] = tokens, row
            flat[1, place] = self.num_computed_tokens[row] + np.arange(len(tokens))
        self.num_computed_tokens += counts
        batch = StepBatch(
            token_ids=flat[0], positions=flat[1], token_row=flat[2], query_start=start,
            kv_len=np.where(counts > 0, self.num_computed_tokens, 0).astype(np.int32), page_table=self.table,
            logit_index=np.arange(self.budget, dtype=np.int32),
        )  # fmt: skip
        logits, self.pool = self.call(self.params, self.pool, jax.tree.map(jnp.asarray, batch))
        return np.split(np.asarray(logits)[:total], start[1:-1])

    def stored(self, row: int) -> np.ndarray:
        """Keys and values of a row, `[2, layers, kv_heads, tokens, head_dim]`."""
        pages = self.table[row]
        both = np.stack([np.asarray(self.pool.k)[:, pages], np.asarray(self.pool.v)[:, pages]])
        both = both.transpose(0, 1, 3, 2, 4, 5)
        return both.reshape(*both.shape[:3], -1, both.shape[-1])[:, :, :, : self.num_computed_tokens[row]]
