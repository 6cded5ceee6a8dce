"""What the host runs on a state, compiled when it is first needed. Engines of one kind share their programs, and a
replay uses them too; the last of them that lets go of the programs gives their memory back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp

from jpaged.pool import Decoder
from jpaged.step import (
    EngineState,
    Moves,
    Status,
    StepRecord,
    Submission,
    abort,
    advance,
    demand,
    evict,
    exchange,
    fork,
    run,
    submit,
)

Three = tuple[jax.Array, jax.Array, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Figures:
    """How a state stands after a program. Each field is a `[]` int32 array of its own, which no later program takes, so
    any thread can read it at any time."""

    demand: Any  # tokens that the next step would compute if no budget limited it
    running: Any  # requests that have a slot
    waiting: Any  # requests on the device that have none
    available: Any  # pages that no request uses
    cached: Any  # of these, pages that can be found


def _figures(state: EngineState, wanted: jax.Array) -> Figures:
    return Figures(
        demand=wanted,
        running=jnp.sum(state.slots.occupied, dtype=jnp.int32),
        waiting=jnp.sum(state.requests.status == Status.WAITING, dtype=jnp.int32),
        available=state.available_pages,
        cached=state.cached_pages,
    )


def burst(
    decoder: Decoder, params: Any, state: EngineState, *, budget: int, steps: int, candidates: int
) -> tuple[EngineState, StepRecord, Figures]:
    """`step.run`"""
    state, records, wanted = run(decoder, params, state, budget=budget, steps=steps, candidates=candidates)
    return state, records, _figures(state, wanted)


def put(state: EngineState, batch: Submission) -> tuple[EngineState, Figures]:
    """Puts requests into the queue."""
    state = submit(state, batch)
    return state, _figures(state, demand(state))


def drop(state: EngineState, uids: jax.Array) -> tuple[EngineState, Figures]:
    """Gives requests up; no request has their pages afterwards."""
    state = evict(abort(state, uids))
    return state, _figures(state, demand(state))


def branch(state: EngineState, forks: Three) -> tuple[EngineState, Figures]:
    """`step.fork`; see `prepare.branch` for its arguments."""
    state = fork(state, *forks)
    return state, _figures(state, demand(state))


def move_on(state: EngineState, beams: Three) -> tuple[EngineState, Figures]:
    """`step.advance`"""
    state = advance(state, *beams)
    return state, _figures(state, demand(state))


def make_room(state: EngineState, ahead: jax.Array) -> tuple[EngineState, tuple[Figures, Moves]]:
    """`step.exchange`; the moves are yet to be done."""
    state, moves = exchange(state, ahead)
    return state, (_figures(state, demand(state)), moves)


class Programs:
    """Compiled programs by what they do and their static sizes. Each takes the state's buffers.

    Args:
        decoder: the model.
        params, state: trees of what has a shape and a dtype, like the arrays that the programs are called with.
    """

    #: Those in use, so that engines of equal shapes compile once. It keeps none alive.
    shared: ClassVar[Any] = WeakValueDictionary()

    def __init__(self, decoder: Decoder, params: Any, state: EngineState):
        self._decoder, self._params, self._state = decoder, params, state
        self._compiled: dict[Any, Any] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, decoder: Decoder, params: Any, state: EngineState) -> Programs:
        """The programs for these arguments, shared with all that use them now."""
        params, state = jax.tree.map(_shape, (params, state))
        leaves, tree = jax.tree.flatten((params, state))
        kind = decoder, tree, *((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        found = cls.shared.get(kind)
        if found is None:
            found = cls.shared.setdefault(kind, cls(decoder, params, state))
        return found

    def burst(self, budget: int, steps: int, candidates: int = 0) -> Any:
        """(parameters, state) -> (state, records, figures); see `burst`."""

        def lower() -> Any:
            # A function of its own: what JAX keeps of it goes when it goes.
            call = partial(burst, self._decoder, budget=budget, steps=steps, candidates=candidates)
            return jax.jit(call, donate_argnums=1).lower(self._params, self._state)

        return self._get((budget, steps, candidates), lower)

    def of_state(self, function: Callable[[EngineState, Any], Any], argument: Any) -> Any:
        """(state, an argument like this one) -> what `function`, one of this module's, returns."""

        def lower() -> Any:
            return jax.jit(partial(function), donate_argnums=0).lower(self._state, argument)

        return self._get((function, *(leaf.shape for leaf in jax.tree.leaves(argument))), lower)

    def _get(self, name: Any, lower: Callable[[], Any]) -> Any:
        with self._lock:  # a program that two threads want is compiled once
            if name not in self._compiled:
                self._compiled[name] = lower().compile()
            return self._compiled[name]


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    """What a program must know of an array. Where it is on the default device that is not said, as JAX does."""
    sharding = array.sharding if getattr(array, "committed", False) else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
