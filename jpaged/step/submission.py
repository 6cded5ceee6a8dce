"""Requests on their way into the state and out of it: what a submission carries, `submit` and `abort`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.step.sampling.params import Sampling
from jpaged.step.sharing.index import prefix_hashes
from jpaged.step.state import EngineState
from jpaged.step.status import NO_REQUEST, Status


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Submission:
    """Requests on their way into the state, in a batch of a fixed size. Fields as in `Requests`; numpy arrays
    while the host fills them in."""

    valid: Any  # [N] bool, the other rows are padding
    uid: Any
    tokens: Any  # [N, T] int32, the prompt, and what was generated already of a request whose state was lost
    num_tokens: Any  # [N] int32, of both
    num_prompt_tokens: Any
    sampling: Sampling
    namespace: Any
    priority: Any
    beam: Any
    parent: Any  # [N] int32, uid of the request of the same tokens whose pages it begins with; NO_REQUEST: none

    @classmethod
    def empty(cls, size: int, max_model_len: int) -> Submission:
        """A batch of padding, as numpy arrays to fill in."""

        def ints(value: int = 0) -> np.ndarray:
            return np.full(size, value, np.int32)

        return cls(
            valid=np.zeros(size, bool), uid=ints(NO_REQUEST), tokens=np.zeros((size, max_model_len), np.int32),
            num_tokens=ints(), num_prompt_tokens=ints(), sampling=Sampling.empty(size), namespace=ints(),
            priority=ints(), beam=np.zeros(size, bool), parent=ints(NO_REQUEST),
        )  # fmt: skip


#: What a submission and `Requests` have in common.
_CARRIED = ("uid", "tokens", "num_tokens", "num_prompt_tokens", "sampling", "namespace", "priority", "beam")


def submit(state: EngineState, batch: Submission) -> EngineState:
    """Puts the valid requests of `batch` into the queue, each at the place of its uid in the order of submission. A
    parent may stand in the same batch, before its forks; a fork of a request that has ended is one like any other.

    There must be that many FREE rows: requests that find none are dropped. `Engine` counts them; a caller that drives
    the state by hand has `max_num_seqs + max_queue` rows.
    """
    requests, rows = state.requests, state.requests.num_rows
    size = batch.valid.shape[0]
    free = jnp.nonzero(requests.status == Status.FREE, size=size, fill_value=rows)[0]
    place = jnp.cumsum(batch.valid, dtype=jnp.int32) - 1
    row = jnp.where(batch.valid, free[jnp.clip(place, 0, size - 1)], rows)  # `rows` is dropped
    new = {name: getattr(batch, name) for name in _CARRIED} | {
        "status": jnp.full(size, Status.WAITING, jnp.int32),
        "arrival": batch.uid,
        "prefix_hash": prefix_hashes(batch.tokens, batch.num_tokens, batch.namespace, state.pool.page_size),
        "cached_tokens": jnp.zeros(size, jnp.int32),
        "preempted": jnp.zeros(size, bool),
    }
    old = {name: getattr(requests, name) for name in new}
    requests = replace(requests, **jax.tree.map(lambda array, values: array.at[row].set(values, mode="drop"), old, new))
    parent = requests.rows_of(batch.parent)
    requests = replace(requests, parent=requests.parent.at[row].set(parent, mode="drop"))
    submitted = state.counters.submitted + jnp.sum(batch.valid, dtype=jnp.uint32)
    return replace(state, requests=requests, counters=replace(state.counters, submitted=submitted))


def abort(state: EngineState, uids: jax.Array) -> EngineState:
    """Marks the live requests named in `uids` `[N] int32` ABORTED. The next eviction takes their pages back."""
    requests = state.requests
    named = jnp.any(requests.uid[:, None] == uids[None], axis=1)
    status = jnp.where(requests.live & named, Status.ABORTED, requests.status)
    return replace(state, requests=replace(requests, status=status))
