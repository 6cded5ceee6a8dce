"""Replay: the inputs of a trace given to an empty state, with the programs that the engine runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.pool import Decoder
from jpaged.record.inputs import Abort, Burst, Fork, ReplaceParams, ResetPrefixCache, Restart, Submit
from jpaged.record.step_records import record_difference, unstacked
from jpaged.record.trace import Trace, made_by
from jpaged.runtime import programs
from jpaged.runtime.host_pool import HostPool
from jpaged.runtime.prepare import branch
from jpaged.runtime.programs import Programs
from jpaged.step import NO_REQUEST, EngineState, StepRecord, make_state


def replay(trace: Trace, decoder: Decoder, params: Any, until: int | None = None) -> EngineState:
    """Gives the inputs of `trace` to an empty state, and compares every step with the trace, to the bit.

    Args:
        trace: of an engine with this decoder and these parameters, in this process or in another.
        decoder: the model.
        params: its weights.
        until: the step to stop after; the first is 1. None: all.

    Returns:
        The state after that step and an eviction: what `Engine.state` was then, or would have been if a burst had
        ended there.

    Raises:
        ValueError: there is no such step, or the weights were replaced before it.
        RuntimeError: a step did something else than it did in the trace; names the step and what.
    """
    if until is not None:
        trace.check_step(until)
    left = len(trace) if until is None else until
    done = 0
    config = trace.config
    assert config.max_model_len is not None
    batch_size = max((len(given.batch.uid) for given in trace.inputs if isinstance(given, Submit)), default=0)
    rows = config.max_num_seqs + config.max_queue
    state = _empty(trace)
    compiled = Programs.of(decoder, params, state)

    def run(function: Any, argument: Any) -> Any:
        return compiled.of_state(function, argument)(state, argument)

    host_pool = None if state.swap is None else HostPool(state.pool, state.swap.num_chunks)
    for given in trace.inputs:
        if until is not None and done == until:
            break
        match given:
            case Submit():
                state, _ = run(programs.put, given.padded(batch_size, config.max_model_len))
            case Fork():
                state, _ = run(programs.branch, branch(given.uid, given.new_uid, given.seed))
            case Abort(uids):
                for first in range(0, len(uids), rows):
                    some = uids[first : first + rows]
                    named = np.full(rows, NO_REQUEST, np.int32)
                    named[: len(some)] = some
                    state, _ = run(programs.drop, named)
            case Burst(budget, steps):
                if host_pool is not None:
                    state, (_, moves) = run(programs.make_room, np.int32(config.steps_per_burst or 1))
                    state = replace(state, pool=host_pool.move(state.pool, jax.device_get(moves)))
                steps = min(steps, left - done)
                state, records, _ = compiled.burst(budget, steps)(params, state)
                _compare(trace, done, jax.device_get(records))
                done += steps
            case ResetPrefixCache():
                nothing = jnp.zeros_like(state.prefixes.cached)
                state = replace(state, prefixes=replace(state.prefixes, cached=nothing))
            case ReplaceParams():
                if done < left:
                    raise ValueError(
                        f"the weights were replaced after step {done}: with the old ones the trace can be replayed "
                        f"until={done}"
                    )
            case Restart():
                for leaf in jax.tree.leaves(state):  # first: the device may have no room for two pools
                    leaf.delete()
                state = _empty(trace)
    return state


def _empty(trace: Trace) -> EngineState:
    return make_state(trace.config, **trace.shape, dtype=jnp.dtype(trace.config.pool_dtype))


def _compare(trace: Trace, done: int, records: StepRecord) -> None:
    for step, record in enumerate(unstacked(records), done + 1):
        if words := record_difference(trace.record(step), record):
            raise RuntimeError(
                f"the replay differs from the trace in step {step}: {words}. Other weights, another decoder or another "
                f"policy of the same name do this; the trace was made by {_words(trace.made_by)}, and this is "
                f"{_words(made_by())}"
            )


def _words(made_by: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in made_by.items())
