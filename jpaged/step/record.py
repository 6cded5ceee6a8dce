"""What a step reports: its record, and totals."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jpaged.step.decisions import Decisions
from jpaged.step.status import NO_REQUEST


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

    uid: jax.Array  # [S] int32, the request in the slot; NO_REQUEST: none
    scheduled: jax.Array  # [S] int32, tokens computed for it
    sampled: jax.Array  # [S] bool, whether it got a new token
    token: jax.Array  # [S] int32, the new token
    logprob: jax.Array  # [S] float32, log-probability the model gave it
    finish: jax.Array  # [S] int32, a Finish
    offered: jax.Array  # [S] bool, whether it is a beam with candidates for its next token
    candidates: jax.Array  # [S, C] int32, those, the most probable first
    candidate_logprobs: jax.Array  # [S, C] float32
    cached_tokens: jax.Array  # [S] int32, as in Requests
    running: jax.Array  # [] slots occupied
    waiting: jax.Array  # [] requests in the queue
    admitted: jax.Array  # [] requests that got a slot
    preempted: jax.Array  # [] requests that lost theirs
    discarded: jax.Array  # [] tokens that they had computed and must compute again
    left: jax.Array  # [S] int32, uid of the request that an exchange took this slot from; NO_REQUEST: none
    to_host: jax.Array  # [S] bool, whether its pages went there
    restored: jax.Array  # [] requests that got a slot in that exchange, with pages of the host
    recovered: jax.Array  # [] tokens that requests preempted before found computed, so that they need not compute them
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
        none = jnp.full(slots, NO_REQUEST, jnp.int32)
        return cls(
            uid=none, scheduled=ints, sampled=jnp.zeros(slots, bool), token=ints,
            logprob=jnp.zeros(slots, jnp.float32), finish=ints, offered=jnp.zeros(slots, bool),
            candidates=jnp.zeros((slots, 0), jnp.int32), candidate_logprobs=jnp.zeros((slots, 0), jnp.float32),
            cached_tokens=ints, running=scalar, waiting=scalar,
            admitted=scalar, preempted=scalar, discarded=scalar, left=none, to_host=jnp.zeros(slots, bool),
            restored=scalar, recovered=scalar, prefix_queries=scalar,
            prefix_hits=scalar, pages_in_use=scalar, pages_cached=scalar, tokens_stored=scalar, decisions=decisions,
        )  # fmt: skip
