"""Decoders that compute nothing: what is left of a step is its scheduling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.pool import KVPool, StepBatch


@dataclass(frozen=True)
class NoModel:
    """The next token is the last one plus 1. The pool is not touched."""

    vocab: int = 64

    def __call__(self, params: Any, pool: KVPool, batch: StepBatch) -> tuple[jax.Array, KVPool]:
        following = (batch.token_ids[batch.logit_index] + 1) % self.vocab
        return jax.nn.one_hot(following, self.vocab, dtype=jnp.float32), pool
