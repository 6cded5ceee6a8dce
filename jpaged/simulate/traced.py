"""The traced part of a simulation: runs side by side, step by step.

once    let the clock jump to the next arrival, if nobody is there
        put those who have arrived into free rows, in the order of the engine's queue on the host
        step, and evict, as a burst of one step does
        add the step's cost to the clock; note who got the first token and who ended
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.config import EngineConfig
from jpaged.models.nothing import NoModel
from jpaged.policy import Policy
from jpaged.pool import SCRATCH_PAGE, KVPool, StepBatch
from jpaged.runtime.costs import CostModel
from jpaged.simulate.clock import Clock
from jpaged.simulate.traffic import Traffic, tokens_of
from jpaged.step import EngineState, Finish, Status, StepRecord, Submission, evict, make_state, step, submit
from jpaged.step.sharing.index import spread

#: Requests that are put into the state at once; what is left over follows before the step.
_FED_AT_ONCE = 8
#: All runs of one program, as `vmap` names them.
_RUNS = "runs"


@dataclass(frozen=True)
class Meter:
    """A decoder that computes nothing and measures the batch. What it reads off it leaves in the scratch page, which
    is nobody's: keys that rows read, and pairs of a query and a key."""

    def __call__(self, params: Any, pool: KVPool, batch: StepBatch) -> tuple[jax.Array, KVPool]:
        real = batch.token_row < batch.num_rows
        keys = jnp.sum(batch.kv_len.astype(jnp.float32))
        pairs = jnp.sum(jnp.where(real, batch.positions + 1, 0).astype(jnp.float32))
        # One token that can be chosen: nothing is sampled.
        logits, pool = NoModel(vocab=1)(params, pool, batch)
        at = (0, SCRATCH_PAGE, 0, 0, 0)
        return logits, KVPool(k=pool.k.at[at].set(keys), v=pool.v.at[at].set(pairs))

    @staticmethod
    def read(pool: KVPool) -> tuple[jax.Array, jax.Array]:
        at = (0, SCRATCH_PAGE, 0, 0, 0)
        return pool.k[at], pool.v[at]


@dataclass(frozen=True)
class Program:
    """What decides the traced program, beside shapes."""

    config: EngineConfig
    costs: CostModel
    policies: tuple[tuple[Policy, Policy], ...]  # for admission and victims; a run has the number of one


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Asked:
    """The traffic as arrays of the device. Classes are requests of one priority."""

    prompt_len: jax.Array  # [N] int32
    output_len: jax.Array  # [N] int32
    priority: jax.Array  # [N] int32
    group: jax.Array  # [N, L] int32
    shared_len: jax.Array  # [N, L] int32
    order: jax.Array  # [N] int32, requests by priority, and then by arrival
    first: jax.Array  # [K] int32, where each class begins in `order`
    size: jax.Array  # [K] int32

    @classmethod
    def of(cls, traffic: Traffic) -> Asked:
        _, first, size = np.unique(np.sort(traffic.priority), return_index=True, return_counts=True)
        arrays = [traffic.prompt_len, traffic.output_len, traffic.priority, traffic.group, traffic.shared_len]
        arrays += [np.argsort(traffic.priority, kind="stable"), first, size]
        return cls(*(jnp.asarray(array, jnp.int32) for array in arrays))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Run:
    """One run, between two steps."""

    state: EngineState
    now: Clock
    fed: jax.Array  # [K] int32, requests of each class that the state has been given
    first_token: Clock  # [N]
    end: Clock  # [N]
    ended: jax.Array  # [] int32, requests
    steps: jax.Array  # [] int32
    most_pages: jax.Array  # [] int32, in use in any step

    @classmethod
    def start(cls, config: EngineConfig, asked: Asked) -> Run:
        nothing = jnp.int32(0)
        never = jnp.full(asked.order.shape, -1, jnp.int32)
        return cls(
            state=make_state(config, layers=1, kv_heads=1, head_dim=1),
            now=Clock(nothing, nothing), fed=jnp.zeros_like(asked.first), first_token=Clock(never, never),
            end=Clock(never, never), ended=nothing, steps=nothing, most_pages=nothing,
        )  # fmt: skip


def _arrived(asked: Asked, arrival: Clock, now: Clock) -> jax.Array:
    """Requests `[K]` of each class that have arrived: a search in the order of their times."""

    def halve(i, found):
        probe = found + (1 << (bits - 1 - i))
        last = jnp.minimum(asked.first + probe, asked.order.shape[0]) - 1
        there = now.reaches(jax.tree.map(lambda times: times[asked.order[last]], arrival))
        return jnp.where((probe <= asked.size) & there, probe, found)

    bits = asked.order.shape[0].bit_length()
    return jax.lax.fori_loop(0, bits, halve, jnp.zeros_like(asked.first))


def _next_arrival(asked: Asked, arrival: Clock, run: Run) -> Clock:
    """When the first comes that the state has not been given; at the end, the last. All before it have been given."""
    index = jnp.minimum(jnp.sum(run.fed, dtype=jnp.int32), asked.order.shape[0] - 1)
    return jax.tree.map(lambda times: times[index], arrival)


def _feed(asked: Asked, arrival: Clock, run: Run) -> Run:
    """Gives the state the requests that have arrived, by priority, while there are free rows. `Engine` does so before
    each burst in the order of its policy, which is the same where all that wait find a row."""
    arrived = _arrived(asked, arrival, run.now)
    waiting = jnp.sum(arrived - run.fed, dtype=jnp.int32)
    free = jnp.sum(run.state.requests.status == Status.FREE, dtype=jnp.int32)
    count = jnp.minimum(waiting, free)
    most = run.state.requests.tokens.shape[1]
    place = jnp.arange(_FED_AT_ONCE, dtype=jnp.int32)

    def batch_of(carry):
        done, state, fed = carry
        runs = spread(arrived - fed, _FED_AT_ONCE)
        valid = done + place < count
        number = asked.first[runs.owner] + fed[runs.owner] + runs.number
        index = asked.order[jnp.where(valid, number, 0)]
        total = asked.prompt_len[index] + asked.output_len[index]
        column = jnp.arange(most, dtype=jnp.int32)
        empty = Submission.empty(_FED_AT_ONCE, most)
        batch = replace(
            empty,
            valid=valid,
            uid=index + 1,  # as an engine names them
            tokens=tokens_of(index, asked.group[index], asked.shared_len[index], column),
            num_tokens=asked.prompt_len[index],
            num_prompt_tokens=asked.prompt_len[index],
            sampling=replace(empty.sampling, max_len=total),
            priority=asked.priority[index],
        )
        fed = fed.at[jnp.where(valid, runs.owner, fed.shape[0])].add(1, mode="drop")
        return done + _FED_AT_ONCE, submit(state, batch), fed

    # As often as one of all runs needs it: so the loop ends for all at once, and no state is copied to keep it.
    longest = jax.lax.pmax(count, _RUNS)
    _, state, fed = jax.lax.while_loop(
        lambda carry: carry[0] < longest, batch_of, (jnp.int32(0), run.state, run.fed)
    )  # fmt: skip
    return replace(run, state=state, fed=fed)


def _once(program: Program, asked: Asked, arrival: Clock, number: jax.Array, run: Run) -> tuple[Run, StepRecord]:
    config, requests = program.config, asked.order.shape[0]
    live = run.ended < requests
    nobody = jnp.all(run.state.requests.status == Status.FREE)
    coming = _next_arrival(asked, arrival, run)
    jumps = nobody & live & ~run.now.reaches(coming)
    run = _feed(asked, arrival, replace(run, now=coming.where(jumps, run.now)))

    # Policies are of the program and not of the data, so that of this run is put in for the step.
    admission, victim = (_chosen(policies, number) for policies in zip(*program.policies, strict=True))
    state = replace(run.state, admission=admission, victim=victim)
    state = step(Meter(), None, state, budget=config.max_num_batched_tokens)
    state = replace(state, admission=config.admission, victim=config.victim)

    record, known = state.record, state.requests.num_tokens[state.slots.request]
    tokens = jnp.sum(record.scheduled, dtype=jnp.int32)
    budgets = jnp.asarray(config.budgets, jnp.int32)
    padded = jnp.min(jnp.where(budgets >= tokens, budgets, config.max_num_batched_tokens))
    taken = program.costs.step(padded.astype(jnp.float32), *Meter.read(state.pool))
    now = run.now.after(taken).where(live, run.now)

    index = record.uid - 1
    first = record.sampled & (known == state.requests.num_prompt_tokens[state.slots.request] + 1)
    ends = record.finish != Finish.NOT
    run = replace(
        run,
        state=evict(state),
        now=now,
        first_token=run.first_token.noted(jnp.where(first, index, requests), now),
        end=run.end.noted(jnp.where(ends, index, requests), now),
        ended=run.ended + jnp.sum(ends, dtype=jnp.int32),
        steps=run.steps + live.astype(jnp.int32),
        most_pages=jnp.maximum(run.most_pages, record.pages_in_use),
    )
    return run, record


def _chosen(policies: tuple[Policy, ...], number: jax.Array) -> Policy:
    """The policy with that number. Their numbers become integers of the same order, so that they have one dtype."""
    if len(set(policies)) == 1:
        return policies[0]

    def choose(requests: Any) -> jax.Array:
        return jnp.stack([_ordered(jnp.asarray(policy(requests))) for policy in policies])[number]

    return choose


def _ordered(numbers: jax.Array) -> jax.Array:
    """Integers, int32, in the order of `numbers` of any dtype of up to 32 bits, as a sort sees it."""
    if jnp.issubdtype(numbers.dtype, jnp.floating):
        numbers = numbers.astype(jnp.float32)
        numbers = jnp.where(numbers == 0, jnp.float32(0), jnp.where(jnp.isnan(numbers), jnp.nan, numbers))
        bits = jax.lax.bitcast_convert_type(numbers, jnp.int32)
        return bits ^ jnp.where(bits < 0, jnp.int32(2**31 - 1), jnp.int32(0))
    if numbers.dtype == jnp.uint32:
        return jax.lax.bitcast_convert_type(numbers ^ jnp.uint32(1 << 31), jnp.int32)
    return numbers.astype(jnp.int32)


@partial(jax.jit, static_argnums=0, static_argnames=("steps", "record"), donate_argnums=4)
def many_steps(
    program: Program, asked: Asked, arrival: Clock, number: jax.Array, runs: Run, *, steps: int, record: bool
) -> tuple[Run, StepRecord | None]:
    """So many steps of V runs. `arrival` is `[V, N]`, `number` `[V]`; records are `[steps, V, ...]`."""

    def every(runs, _):
        runs, records = jax.vmap(partial(_once, program, asked), axis_name=_RUNS)(arrival, number, runs)
        return runs, records if record else None

    return jax.lax.scan(every, runs, length=steps)
