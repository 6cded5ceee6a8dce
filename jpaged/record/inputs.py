"""The inputs of an engine: all that changes its state from outside."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np

from jpaged.step import Submission


@dataclass(frozen=True)
class Submit:
    """Requests put into the queue on the device: the valid rows of a `Submission`, tokens up to the longest."""

    batch: Submission

    @classmethod
    def of(cls, batch: Submission) -> Submit:
        valid = np.flatnonzero(batch.valid)
        rows: Submission = jax.tree.map(lambda array: array[valid], batch)
        longest = int(rows.num_tokens.max(initial=0))
        return cls(replace(rows, tokens=rows.tokens[:, :longest]))

    def padded(self, size: int, max_model_len: int) -> Submission:
        """The rows in a batch of `size`, as the state takes it."""
        batch = Submission.empty(size, max_model_len)
        for into, rows in zip(jax.tree.leaves(batch), jax.tree.leaves(self.batch), strict=True):
            into[tuple(slice(size) for size in rows.shape)] = rows
        return batch


@dataclass(frozen=True)
class Fork:
    """A fork of a running request."""

    uid: int
    new_uid: int
    seed: int


@dataclass(frozen=True)
class Abort:
    """Requests that were aborted and left at once, and prompts as long as `max_model_len`, which ended on the host."""

    uids: tuple[int, ...]


@dataclass(frozen=True)
class Burst:
    """`steps` steps of at most `budget` tokens, and an eviction."""

    budget: int
    steps: int


@dataclass(frozen=True)
class ResetPrefixCache:
    """All cached pages became free."""


@dataclass(frozen=True)
class ReplaceParams:
    """The engine took other weights."""


@dataclass(frozen=True)
class Restart:
    """An empty state: at the start, and after a call that failed or was interrupted and lost the state."""


Input = Submit | Fork | Abort | Burst | ResetPrefixCache | ReplaceParams | Restart
#: Every kind by its name, for files.
INPUTS: dict[str, type] = {
    kind.__name__: kind for kind in (Submit, Fork, Abort, Burst, ResetPrefixCache, ReplaceParams, Restart)
}
