"""The engine as one immutable value. Every array has a fixed shape; its meaning stands beside it.

    S  slots: max_num_seqs                 R  request rows: max_num_seqs + max_queue
    P  pages: 1 + num_pages                M  pages a request can have: ceil(max_model_len / page_size)
    T  tokens a request can have

A request lives in a row of `Requests` from submission to its end, with all its tokens. While it runs it has a slot,
and the slot has its pages. The waiting queue is the rows whose status is WAITING, in the order of `arrival`, but for
forks that wait for their parent; a preempted request goes back to it by changing its status, and keeps its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jpaged.policy import Policy, by_priority
from jpaged.pool import SCRATCH_PAGE, KVPool
from jpaged.step.record import Counters, StepRecord
from jpaged.step.sampling.params import Sampling
from jpaged.step.sharing.index import Prefixes
from jpaged.step.status import NO_REQUEST, Status
from jpaged.step.swap.table import Swap


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Requests:
    """What the engine knows of each request."""

    status: jax.Array  # [R] int32, a Status
    uid: jax.Array  # [R] int32, the caller's number for it; numbers grow in the order of submission
    arrival: jax.Array  # [R] int32, place in that order: the uid, also of one that was put in later than others
    priority: jax.Array  # [R] int32, for policies; the smaller goes first
    tokens: jax.Array  # [R, T] int32, prompt and output; only the first `num_tokens` mean anything
    num_tokens: jax.Array  # [R] int32, tokens of prompt and output so far
    num_prompt_tokens: jax.Array  # [R] int32
    sampling: Sampling  # [R, ...], how it is continued and when it ends
    namespace: jax.Array  # [R] int32, only requests of one namespace share pages
    prefix_hash: jax.Array  # [R, M, 2] uint32, of all tokens up to the end of each page, or up to `num_tokens`
    cached_tokens: jax.Array  # [R] int32, tokens of the prompt that it found computed; not those found when resumed
    preempted: jax.Array  # [R] bool, whether it has ever lost its slot
    beam: jax.Array  # [R] bool, the step samples no token for it but offers candidates; see `sharing.beam`
    parent: jax.Array  # [R] int32, row whose pages it waits for, to begin with them; NO_REQUEST: none, or it has begun

    @property
    def num_rows(self) -> int:
        return self.status.shape[0]

    @property
    def live(self) -> jax.Array:
        """`[R]` bool, whether there is a request that has not ended."""
        return (self.status == Status.WAITING) | (self.status == Status.RUNNING)

    def of(self, row: jax.Array) -> Requests:
        """Those of the rows `row` `[K]`."""
        return jax.tree.map(lambda array: array[row], self)

    def rows_of(self, uids: jax.Array) -> jax.Array:
        """The rows `[N]` of the live requests named in `uids` `[N]` int32; NO_REQUEST for those that are not there."""
        named = self.live[None] & (self.uid[None] == uids[:, None])
        row = jnp.argmax(named, axis=1).astype(jnp.int32)
        return jnp.where(jnp.any(named, axis=1), row, NO_REQUEST)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """The running batch."""

    occupied: jax.Array  # [S] bool
    request: jax.Array  # [S] int32, row of Requests; meaningless where not occupied
    num_computed_tokens: jax.Array  # [S] int32, tokens whose keys and values are in the pool
    entered: jax.Array  # [S] int32, full pages that were offered to others already; see `share.enter`
    num_pages: jax.Array  # [S] int32, pages in the table
    page_table: jax.Array  # [S, M] int32, page of each page_size tokens; only the first `num_pages` mean anything

    @property
    def num_slots(self) -> int:
        return self.occupied.shape[0]

    @property
    def named_pages(self) -> jax.Array:
        """`page_table` with SCRATCH_PAGE past the end of each table, for people and pictures: `[S, M]`."""
        column = jnp.arange(self.page_table.shape[1], dtype=jnp.int32)[None]
        return jnp.where(column < self.num_pages[:, None], self.page_table, SCRATCH_PAGE)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """Everything. `step` takes one and returns the next."""

    pool: KVPool
    holders: jax.Array  # [W, P] uint32, the slots whose tables name the page, a bit each; see `pages`
    refcount: jax.Array  # [P] int32, how many these are; the scratch page counts 1 of its own
    prefixes: Prefixes
    slots: Slots
    requests: Requests
    counters: Counters
    record: StepRecord
    swap: Swap | None = None  # where `EngineConfig.preemption` asks for it; part of the program
    # Of the program, not of the data: see `jpaged.policy`.
    admission: Policy = field(default=by_priority, metadata={"static": True})
    victim: Policy = field(default=by_priority, metadata={"static": True})

    @property
    def available_pages(self) -> jax.Array:
        """Unused pages, cached or free."""
        return jnp.sum(self.refcount == 0, dtype=jnp.int32)

    @property
    def cached_pages(self) -> jax.Array:
        """Unused pages that are cached."""
        return jnp.sum((self.refcount == 0) & self.prefixes.cached, dtype=jnp.int32)

    @property
    def free_pages(self) -> jax.Array:
        """Unused pages that are not cached."""
        return self.available_pages - self.cached_pages
