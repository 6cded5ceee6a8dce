"""Driving the state by hand: submissions from Python values, and a loop that collects what each request got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.config import EngineConfig
from jpaged.pool import Decoder
from jpaged.runtime.host_pool import HostPool
from jpaged.step import (
    NO_REQUEST,
    EngineState,
    Finish,
    Moves,
    Submission,
    abort,
    exchange,
    fork,
    make_state,
    run,
    step,
    submit,
    violations,
)
from support.stubs import STUB_SHAPE


@dataclass(frozen=True)
class Ask:
    """A request, with `Requests`' fields."""

    uid: int
    prompt: Sequence[int]
    max_len: int
    min_len: int = 0
    stop_ids: Sequence[int] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    namespace: int = 0
    priority: int = 0
    beam: bool = False
    parent: int = NO_REQUEST


def submission(config: EngineConfig, asks: Sequence[Ask], size: int | None = None) -> Submission:
    """A batch of `size` (default: as many as `asks`) for `submit`."""
    assert config.max_model_len is not None
    batch = Submission.empty(len(asks) if size is None else size, config.max_model_len)
    for index, ask in enumerate(asks):
        batch.valid[index] = True
        batch.tokens[index, : len(ask.prompt)] = ask.prompt
        batch.num_tokens[index] = batch.num_prompt_tokens[index] = len(ask.prompt)
        batch.sampling.stop_ids[index, : len(ask.stop_ids)] = ask.stop_ids
        for name in ("uid", "namespace", "priority", "beam", "parent"):
            getattr(batch, name)[index] = getattr(ask, name)
        for name in ("max_len", "min_len", "temperature", "top_k", "top_p", "min_p", "seed"):
            getattr(batch.sampling, name)[index] = getattr(ask, name)
    return batch


@dataclass
class Got:
    """What one request got: ids, their log-probabilities, the step of each, how much of its prompt was computed
    already, and why it ended."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finish: Finish = Finish.NOT


@lru_cache(maxsize=64)
def compiled(decoder: Decoder, budget: int, steps: int | None = None, candidates: int = 0):
    """`step`, or `run` of `steps`, under `jax.jit`, with the state donated: `f(params, state)`. As nothing takes time
    here but compiling, LLVM's optimizations are left out; XLA's are not."""
    options = {"xla_backend_optimization_level": 0}
    if steps is None:
        function = partial(step, decoder, budget=budget, candidates=candidates)
    else:
        function = partial(run, decoder, budget=budget, steps=steps, candidates=candidates)
    return jax.jit(function, donate_argnums=1, compiler_options=options)


jit_submit = jax.jit(submit, donate_argnums=0)
jit_abort = jax.jit(abort, donate_argnums=0)
jit_fork = jax.jit(fork, donate_argnums=0)
jit_exchange = jax.jit(exchange, donate_argnums=0, compiler_options={"xla_backend_optimization_level": 0})


class Driver:
    """An engine state and a decoder: submit, step, look. `check` looks for violations after every step."""

    def __init__(self, config: EngineConfig, decoder: Decoder, params: Any = None, *, check=True, **shape):
        self.config, self.decoder, self.params, self.check = config, decoder, params, check
        self.state: EngineState = make_state(config, **(shape or STUB_SHAPE))
        self.got: dict[int, Got] = {}
        self.steps = 0
        self.host_pool: HostPool | None = None

    def submit(self, *asks: Ask) -> None:
        self.got |= {ask.uid: Got() for ask in asks}
        self.state = jit_submit(self.state, submission(self.config, asks))

    def fork(self, uid: int, new_uid: int, seed: int = 0) -> None:
        """What `new_uid` got includes what `uid` has by then."""
        old = self.got[uid]
        self.got[new_uid] = Got([*old.tokens], [*old.logprobs], [*old.steps])
        uids, new_uids, seeds = (np.array([value]) for value in (uid, new_uid, seed))
        self.state = jit_fork(self.state, uids.astype(np.int32), new_uids.astype(np.int32), seeds.astype(np.uint32))

    def abort(self, *uids: int) -> None:
        self.state = jit_abort(self.state, jnp.array(uids, jnp.int32))

    def exchange(self, ahead: int = 1) -> Moves:
        """With the host, for a state that has a pool there."""
        if self.host_pool is None:
            assert self.state.swap is not None
            self.host_pool = HostPool(self.state.pool, self.state.swap.num_chunks)
        self.state, moves = jit_exchange(self.state, ahead)
        moves = jax.device_get(moves)
        self.state = replace(self.state, pool=self.host_pool.move(self.state.pool, moves))
        return moves

    def step(self, budget: int | None = None):
        """One step; returns its record as numpy arrays."""
        budget = self.config.max_num_batched_tokens if budget is None else budget
        self.state = compiled(self.decoder, budget)(self.params, self.state)
        self.steps += 1
        record = jax.tree.map(np.asarray, self.state.record)
        for slot in np.flatnonzero(record.sampled | (record.finish != Finish.NOT)):
            got = self.got[int(record.uid[slot])]
            if record.sampled[slot]:
                got.tokens.append(int(record.token[slot]))
                got.logprobs.append(float(record.logprob[slot]))
                got.steps.append(self.steps)
            got.cached_tokens = int(record.cached_tokens[slot])
            got.finish = Finish(record.finish[slot])
        if self.check:
            assert violations(self.state) == []
        return record

    def until_done(self, budget: int | None = None, limit: int = 2000) -> dict[int, Got]:
        """Steps until nobody runs or waits; an engine that spins fails here."""
        for _ in range(limit):
            record = self.step(budget)
            if record.running == 0 and record.waiting == 0:
                return self.got
        raise AssertionError(f"requests are still there after {limit} steps")
