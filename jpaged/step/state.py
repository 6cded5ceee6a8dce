"""The engine as one immutable value. Every array has a fixed shape; its meaning stands beside it.

    S  slots: max_num_seqs                 R  request rows: max_num_seqs + max_queue
    P  pages: 1 + num_pages                M  pages a request can have: ceil(max_model_len / page_size)
    T  tokens a request can have           K  stop tokens a request can name

A request lives in a row of `Requests` from submission to its end, with all its tokens. While it runs it has a slot,
and the slot has its pages. The waiting queue is the rows whose status is WAITING, in the order of `arrival`, but for
forks that wait for their parent; a preempted request goes back to it by changing its status, and keeps its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.policy import Policy, by_priority
from jpaged.pool import KVPool
from jpaged.request import MAX_STOP_TOKENS
from jpaged.step.decisions import Decisions
from jpaged.step.sharing.index import Prefixes, prefix_hashes
from jpaged.step.swap.table import Swap


class Status(IntEnum):
    """Where a request row is in its life."""

    FREE = 0  # no request; its old tokens can still be looked at
    WAITING = 1  # in the queue, new or preempted
    RUNNING = 2  # has a slot
    FINISHED = 3  # has a slot until the next eviction
    ABORTED = 4  # given up by the caller; has a slot until the next eviction


class Finish(IntEnum):
    """Why a request ended, as the step records it."""

    NOT = 0
    STOP = 1
    LENGTH = 2
    ERROR = 3


#: Fills unused places of `stop_ids`: no token has this id.
NO_TOKEN = -1
#: Names no request.
NO_UID = -1
#: The parent of a request that has none.
NO_ROW = -1


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
    prompt_len: jax.Array  # [R] int32
    max_len: jax.Array  # [R] int32, ends when `num_tokens` reaches it
    min_len: jax.Array  # [R] int32, no stop token is sampled while `num_tokens` is less
    stop_ids: jax.Array  # [R, K] int32, tokens that end it; NO_TOKEN where unused
    temperature: jax.Array  # [R] float32, 0: greedy
    top_k: jax.Array  # [R] int32, 0: all
    top_p: jax.Array  # [R] float32
    min_p: jax.Array  # [R] float32
    seed: jax.Array  # [R] uint32, with the position it makes the sampling key
    namespace: jax.Array  # [R] int32, only requests of one namespace share pages
    prefix_hash: jax.Array  # [R, M, 2] uint32, of all tokens up to the end of each page, or up to `num_tokens`
    cached_tokens: jax.Array  # [R] int32, tokens of the prompt that it found computed; not those found when resumed
    preempted: jax.Array  # [R] bool, whether it has ever lost its slot
    held: jax.Array  # [R] bool, whether it is given no token, but offers candidates; see `beam`
    parent: jax.Array  # [R] int32, row whose pages it waits for, to begin with them; NO_ROW: none, or it has begun

    @property
    def num_rows(self) -> int:
        return self.status.shape[0]

    @property
    def live(self) -> jax.Array:
        """`[R]` bool, whether there is a request that has not ended."""
        return (self.status == Status.WAITING) | (self.status == Status.RUNNING)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """The running batch."""

    occupied: jax.Array  # [S] bool
    request: jax.Array  # [S] int32, row of Requests; meaningless where not occupied
    num_computed_tokens: jax.Array  # [S] int32, tokens whose keys and values are in the pool
    entered: jax.Array  # [S] int32, full pages that were offered to others already; see `share.enter`
    num_pages: jax.Array  # [S] int32, pages in the table
    page_table: jax.Array  # [S, M] int32, page of each page_size tokens; SCRATCH_PAGE where unused

    @property
    def num_slots(self) -> int:
        return self.occupied.shape[0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Counters:
    """Totals since the state was made; they wrap at 2**32."""

    submitted: jax.Array  # [] uint32, requests
    steps: jax.Array  # [] uint32
    computed_tokens: jax.Array  # [] uint32, token rows that computed a token of a request
    padded_tokens: jax.Array  # [] uint32, token rows that computed nothing
    preemptions: jax.Array  # [] uint32
    prefix_queries: jax.Array  # [] uint32, tokens of the prompts that were admitted, each request once
    prefix_hits: jax.Array  # [] uint32, those of them that were found computed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepRecord:
    """What the last step did, for the host and for people to read. All scalars are int32."""

    uid: jax.Array  # [S] int32, whose slot it was
    scheduled: jax.Array  # [S] int32, tokens computed for it
    sampled: jax.Array  # [S] bool, whether it got a new token
    token: jax.Array  # [S] int32, the new token
    logprob: jax.Array  # [S] float32, log-probability the model gave it
    finish: jax.Array  # [S] int32, a Finish
    offered: jax.Array  # [S] bool, whether it is held, and has candidates for its next token
    candidates: jax.Array  # [S, C] int32, those, the most probable first
    candidate_logprobs: jax.Array  # [S, C] float32
    cached_tokens: jax.Array  # [S] int32, as in Requests
    running: jax.Array  # [] slots occupied
    waiting: jax.Array  # [] requests in the queue
    admitted: jax.Array  # [] requests that got a slot
    preempted: jax.Array  # [] requests that lost theirs
    discarded: jax.Array  # [] tokens that they had computed and must compute again
    left: jax.Array  # [S] int32, uid of who of them lost this slot in an exchange before the step; 0: nobody
    to_host: jax.Array  # [S] bool, whether its pages went there
    restored: jax.Array  # [] requests that got a slot in that exchange, with pages of the host
    recovered: jax.Array  # [] tokens that those who lost theirs before found computed, and must not
    prefix_queries: jax.Array  # [] tokens of the prompts that were admitted, each request once
    prefix_hits: jax.Array  # [] those of them, and of prompts admitted before, that were found computed
    pages_in_use: jax.Array  # [] pages in some table
    pages_cached: jax.Array  # [] pages in none that hold what can be found
    tokens_stored: jax.Array  # [] tokens whose keys and values are in pages in use
    decisions: Decisions | None = None  # where `EngineConfig.trace` asks for them; part of the program

    def with_candidates(self, count: int) -> StepRecord:
        """This, with room for `count` candidates a slot and none in it."""
        shape = self.uid.shape[0], count
        return replace(
            self, candidates=jnp.zeros(shape, jnp.int32), candidate_logprobs=jnp.zeros(shape, jnp.float32)
        )  # fmt: skip

    @classmethod
    def zeros(cls, slots: int, decisions: Decisions | None = None) -> StepRecord:
        ints, scalar = jnp.zeros(slots, jnp.int32), jnp.int32(0)
        return cls(
            uid=ints, scheduled=ints, sampled=jnp.zeros(slots, bool), token=ints,
            logprob=jnp.zeros(slots, jnp.float32), finish=ints, offered=jnp.zeros(slots, bool),
            candidates=jnp.zeros((slots, 0), jnp.int32), candidate_logprobs=jnp.zeros((slots, 0), jnp.float32),
            cached_tokens=ints, running=scalar, waiting=scalar,
            admitted=scalar, preempted=scalar, discarded=scalar, left=ints, to_host=jnp.zeros(slots, bool),
            restored=scalar, recovered=scalar, prefix_queries=scalar,
            prefix_hits=scalar, pages_in_use=scalar, pages_cached=scalar, tokens_stored=scalar, decisions=decisions,
        )  # fmt: skip


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """Everything. `step` takes one and returns the next."""

    pool: KVPool
    refcount: jax.Array  # [P] int32, tables that name the page; the scratch page counts 1 of its own
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
        """Pages that nobody uses, cached or free."""
        return jnp.sum(self.refcount == 0, dtype=jnp.int32)

    @property
    def cached_pages(self) -> jax.Array:
        """Pages that nobody uses and that can be found."""
        return jnp.sum((self.refcount == 0) & self.prefixes.cached, dtype=jnp.int32)

    @property
    def free_pages(self) -> jax.Array:
        """Pages that nobody uses or finds."""
        return self.available_pages - self.cached_pages


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Submission:
    """Requests on their way into the state, in a batch of a fixed size. Fields as in `Requests`; numpy arrays
    while the host fills them in."""

    valid: Any  # [N] bool, the other rows are padding
    uid: Any
    tokens: Any  # [N, T] int32, the prompt, and what was generated already of a request whose state was lost
    num_tokens: Any  # [N] int32, of both
    prompt_len: Any
    max_len: Any
    min_len: Any
    stop_ids: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any
    namespace: Any
    priority: Any
    held: Any
    parent: Any  # [N] int32, uid of the request of the same tokens whose pages it begins with; NO_UID: none

    @classmethod
    def empty(cls, size: int, max_model_len: int) -> Submission:
        """A batch of padding, as numpy arrays to fill in."""
        ints, floats = np.zeros(size, np.int32), np.zeros(size, np.float32)
        return cls(
            valid=np.zeros(size, bool), uid=ints.copy(), tokens=np.zeros((size, max_model_len), np.int32),
            num_tokens=ints.copy(), prompt_len=ints.copy(), max_len=ints.copy(), min_len=ints.copy(),
            stop_ids=np.full((size, MAX_STOP_TOKENS), NO_TOKEN, np.int32), temperature=floats.copy(),
            top_k=ints.copy(), top_p=np.ones(size, np.float32), min_p=floats.copy(), seed=np.zeros(size, np.uint32),
            namespace=ints.copy(), priority=ints.copy(), held=np.zeros(size, bool),
            parent=np.full(size, NO_UID, np.int32),
        )  # fmt: skip


def submit(state: EngineState, batch: Submission) -> EngineState:
    """Puts the valid requests of `batch` into the queue, each at the place of its uid in the order of submission. A
    parent may stand in the same batch, before its forks; a fork of one that has ended is a request like any other.

    There must be that many FREE rows: requests that find none are dropped. `Engine` counts; who drives the state by
    hand has `max_num_seqs + max_queue` rows.
    """
    requests, rows = state.requests, state.requests.num_rows
    size = batch.valid.shape[0]
    free = jnp.nonzero(requests.status == Status.FREE, size=size, fill_value=rows)[0]
    place = jnp.cumsum(batch.valid, dtype=jnp.int32) - 1
    row = jnp.where(batch.valid, free[jnp.clip(place, 0, size - 1)], rows)  # `rows` is dropped
    carried = {
        name: getattr(requests, name).at[row].set(getattr(batch, name), mode="drop")
        for name in (
            "uid", "tokens", "num_tokens", "prompt_len", "max_len", "min_len", "stop_ids", "temperature", "top_k",
            "top_p", "min_p", "seed", "namespace", "priority", "held",
        )
    }  # fmt: skip
    hashes = prefix_hashes(batch.tokens, batch.num_tokens, batch.namespace, state.pool.page_size)
    requests = replace(
        requests,
        **carried,
        status=requests.status.at[row].set(Status.WAITING, mode="drop"),
        arrival=requests.arrival.at[row].set(batch.uid, mode="drop"),
        prefix_hash=requests.prefix_hash.at[row].set(hashes, mode="drop"),
        cached_tokens=requests.cached_tokens.at[row].set(0, mode="drop"),
        preempted=requests.preempted.at[row].set(False, mode="drop"),
    )
    parent = rows_of(requests, batch.parent)
    requests = replace(requests, parent=requests.parent.at[row].set(parent, mode="drop"))
    submitted = state.counters.submitted + jnp.sum(batch.valid, dtype=jnp.uint32)
    return replace(state, requests=requests, counters=replace(state.counters, submitted=submitted))


def abort(state: EngineState, uids: jax.Array) -> EngineState:
    """Marks the live requests named in `uids` `[N] int32` ABORTED. The next eviction takes their pages back."""
    requests = state.requests
    named = jnp.any(requests.uid[:, None] == uids, axis=1)
    status = jnp.where(requests.live & named, Status.ABORTED, requests.status)
    return replace(state, requests=replace(requests, status=status))


def rows_of(requests: Requests, uids: jax.Array) -> jax.Array:
    """The rows `[N]` of the live requests named in `uids` `[N] int32`; NO_ROW for those that are not there."""
    named = requests.live & (requests.uid == uids[:, None])
    return jnp.where(jnp.any(named, axis=1), jnp.argmax(named, axis=1).astype(jnp.int32), NO_ROW)
