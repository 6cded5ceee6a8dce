"""What the host runs on a state, jitted once: a second engine of the same sizes, or a replay, finds what the first has
compiled. All take the state's buffers. Those between bursts return the state, and what the next step would compute."""

from __future__ import annotations

from functools import partial

import jax

from jpaged.step import EngineState, Moves, Submission, abort, advance, demand, evict, exchange, fork, run, submit

Three = tuple[jax.Array, jax.Array, jax.Array]

#: `step.run`
burst = jax.jit(run, static_argnums=0, static_argnames=("budget", "steps", "candidates"), donate_argnums=2)


@partial(jax.jit, donate_argnums=0)
def put(state: EngineState, batch: Submission) -> tuple[EngineState, jax.Array]:
    """Puts requests into the queue."""
    state = submit(state, batch)
    return state, demand(state)


@partial(jax.jit, donate_argnums=0)
def drop(state: EngineState, uids: jax.Array) -> tuple[EngineState, jax.Array]:
    """Gives requests up; nobody has their pages afterwards."""
    state = evict(abort(state, uids))
    return state, demand(state)


@partial(jax.jit, donate_argnums=0)
def branch(state: EngineState, forks: Three) -> tuple[EngineState, jax.Array]:
    """`step.fork`; see `submission.branch` for its arguments."""
    state = fork(state, *forks)
    return state, demand(state)


@partial(jax.jit, donate_argnums=0)
def move_on(state: EngineState, beams: Three) -> tuple[EngineState, jax.Array]:
    """`step.advance`"""
    state = advance(state, *beams)
    return state, demand(state)


@partial(jax.jit, donate_argnums=0)
def make_room(state: EngineState, ahead: jax.Array) -> tuple[EngineState, tuple[jax.Array, Moves]]:
    """`step.exchange`; the moves are yet to be done."""
    state, moves = exchange(state, ahead)
    return state, (demand(state), moves)
