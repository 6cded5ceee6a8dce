"""The step: one pure function from one engine state to the next, and bursts of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.pool import Decoder
from jpaged.step import stop
from jpaged.step.decisions import decided
from jpaged.step.record import StepRecord
from jpaged.step.sampling.logprobs import most_probable
from jpaged.step.sampling.params import Sampling
from jpaged.step.sampling.sample import sample
from jpaged.step.scheduling.admit import admit
from jpaged.step.scheduling.evict import evict, preempt
from jpaged.step.scheduling.grant import grant, most_pages, schedule
from jpaged.step.scheduling.pack import pack
from jpaged.step.sharing.fork import copy_tails, disown
from jpaged.step.sharing.index import token_hash
from jpaged.step.sharing.lookup import attach, book_pages, enter
from jpaged.step.state import EngineState
from jpaged.step.status import NO_REQUEST, Finish, Status


def step(decoder: Decoder, params: Any, state: EngineState, *, budget: int, candidates: int = 0) -> EngineState:
    """One step of the engine: at most `budget` tokens (a static shape) are computed, and `candidates` (as well) offered
    for each request that is held.

        evict     requests that ended give back slots and pages
        preempt   the youngest make room where pages run out
        admit     the head of the queue gets slots, and pages that hold its first tokens already
        schedule  tokens for each slot within the budget, and the pages they need
        copy      the last page of a parent, for a fork that goes on in its own
        pack      one batch without gaps
        forward   the model computes it, writing keys and values into the pool
        sample    a token for each request that has no more tokens to compute
        stop      what ended is marked FINISHED
        enter     pages that are full now can be found by others
        attach    running requests take pages that others have computed

    What happened is in `state.record`. Pure: use it under `jax.jit`, with the state donated.
    """
    evicted = evict(state)
    kept = preempt(evicted, budget)
    admitted, copied = admit(kept, budget)
    scheduled, tokens = schedule(admitted, budget)
    state = copy_tails(scheduled, copied, budget)
    batch, slot_of_row = pack(state, tokens, budget)
    logits, pool = decoder(params, state.pool, batch)
    state = replace(state, pool=pool)
    sampled = sample(logits, _options(state, slot_of_row), batch.kv_len)
    state = _finish(state, tokens, slot_of_row, (*sampled, *most_probable(logits, candidates)), budget)
    state = book_pages(attach(enter(state, most_pages(state, budget))))
    return _trace(state, evicted, [kept, admitted, scheduled, state], budget)


def run(
    decoder: Decoder, params: Any, state: EngineState, *, budget: int, steps: int, candidates: int = 0
) -> tuple[EngineState, StepRecord, jax.Array]:
    """A burst: `steps` steps in one call, without the host.

    Returns:
        The state, after an eviction, so that what ended in the burst holds no page; the records of the steps,
        stacked `[steps, ...]`; and the tokens that a next step without a limit would compute, `[] int32`.
    """

    def once(state, _):
        state = step(decoder, params, state, budget=budget, candidates=candidates)
        return state, state.record

    # Outside of a burst a state has the same shape, whatever runs it.
    state = replace(state, record=state.record.with_candidates(candidates))
    state, records = jax.lax.scan(once, state, length=steps)
    state = evict(replace(state, record=state.record.with_candidates(0)))
    return state, records, demand(state)


def demand(state: EngineState) -> jax.Array:
    """Tokens `[] int32` that the next step computes if no budget limits it: what running requests want, and those
    that would be admitted from the queue."""
    unlimited = state.requests.tokens.size
    return jnp.sum(grant(admit(state, unlimited)[0], unlimited), dtype=jnp.int32)


def _trace(state: EngineState, evicted: EngineState, stages: list[EngineState], budget: int) -> EngineState:
    """Records what the step decided, in a state that keeps a trace. `stages` as in `decisions.decided`."""
    last = state.record.decisions
    if last is None:
        return state
    lost = evicted.slots.occupied & ~stages[0].slots.occupied
    preempted = jnp.where(lost, evicted.requests.uid[evicted.slots.request], NO_REQUEST)
    tables, kept = [stage.slots for stage in stages], stages[0].slots.num_pages
    restored = None if evicted.swap is None else evicted.swap.notes.placed
    now = decided(last, tables, preempted, kept, restored, state.prefixes.cached, most_pages(state, budget))
    return replace(state, record=replace(state.record, decisions=now))


def _options(state: EngineState, slot_of_row: jax.Array) -> Sampling:
    """The sampling options `[rows]` of a batch; padding rows are greedy."""
    last = state.slots.num_slots - 1
    return state.requests.sampling.of(state.slots.request[jnp.minimum(slot_of_row, last)]).where(slot_of_row <= last)


def _finish(
    state: EngineState,
    tokens: jax.Array,
    slot_of_row: jax.Array,
    found: tuple[jax.Array, ...],
    budget: int,
) -> EngineState:
    """Books what the step computed: new tokens, ends, counters, record. Its pages are booked by `book_pages`."""
    slots, requests = state.slots, state.requests
    num_slots = slots.num_slots

    def to_slots(values):
        return jnp.zeros((num_slots, *values.shape[1:]), values.dtype).at[slot_of_row].set(values, mode="drop")

    token, logprob, healthy, offers, offered_logprobs = map(to_slots, found)
    row = slots.request
    computed = slots.num_computed_tokens + tokens
    due = slots.occupied & (tokens > 0) & (computed == requests.num_tokens[row])
    sampled = due & healthy & ~requests.beam[row]
    known = requests.num_tokens[row] + sampled.astype(jnp.int32)
    failed = slots.occupied & (tokens > 0) & ~healthy
    finish = stop.finish(requests.sampling.of(row), token, known, sampled, failed)

    new_row = jnp.where(sampled, row, requests.num_rows)
    failed_row = jnp.where(failed, row, requests.num_rows)
    failed = jnp.zeros(requests.num_rows, bool).at[failed_row].set(True, mode="drop")
    end_row = jnp.where(finish != Finish.NOT, row, requests.num_rows)
    # The page that the new token goes to, and the hash of what stands before it there.
    page, offset = jnp.divmod(known - 1, state.pool.page_size)
    hash_ = requests.prefix_hash[row, jnp.where(offset == 0, jnp.maximum(page - 1, 0), page)]
    hash_ += token_hash(token, known - 1)
    requests = replace(
        requests,
        prefix_hash=requests.prefix_hash.at[new_row, page].set(hash_, mode="drop"),
        tokens=requests.tokens.at[new_row, known - 1].set(token, mode="drop"),
        num_tokens=requests.num_tokens.at[new_row].set(known, mode="drop"),
        status=requests.status.at[end_row].set(Status.FINISHED, mode="drop"),
        parent=disown(requests, failed),
    )
    total = jnp.sum(tokens, dtype=jnp.uint32)
    counters = replace(
        state.counters,
        steps=state.counters.steps + 1,
        computed_tokens=state.counters.computed_tokens + total,
        padded_tokens=state.counters.padded_tokens + budget - total,
    )
    slots = replace(slots, num_computed_tokens=computed)
    record = replace(
        state.record,  # what was noted on the way
        uid=jnp.where(slots.occupied, requests.uid[row], NO_REQUEST),
        scheduled=tokens,
        sampled=sampled,
        token=token,
        logprob=logprob,
        finish=finish,
        offered=due & healthy & requests.beam[row],
        candidates=offers,
        candidate_logprobs=offered_logprobs,
        cached_tokens=jnp.where(slots.occupied, requests.cached_tokens[row], 0),
        running=jnp.sum(slots.occupied, dtype=jnp.int32),
        waiting=jnp.sum(requests.status == Status.WAITING, dtype=jnp.int32),
    )
    return replace(state, slots=slots, requests=requests, counters=counters, record=record)
