"""The device's side of an engine: the state, and the programs that take it and give back the next."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jpaged.config import EngineConfig
from jpaged.models.spec import ModelConfig
from jpaged.pool import Decoder
from jpaged.record.inputs import Burst, Input, Restart
from jpaged.record.snapshot import unpack_state
from jpaged.record.stats import TokenEvent
from jpaged.record.trace import Trace
from jpaged.runtime import programs
from jpaged.runtime.compilation_cache import programs_kept
from jpaged.runtime.footprint import empty_state, pool_shape
from jpaged.runtime.host_pool import HostPool
from jpaged.runtime.prepare import branch
from jpaged.runtime.programs import Figures, Programs
from jpaged.runtime.reading import Reading
from jpaged.step import NO_REQUEST, EngineState, StepRecord, Submission

#: Requests that one call puts into the state; a static shape.
SUBMIT_BATCH = 16


@dataclass
class Flight:
    """A burst that was started and whose records were not read yet."""

    budget: int
    steps: int
    records: StepRecord  # on the device
    demand: jax.Array  # after it
    told: Burst | None  # in the trace; None: there is none, or it has its records
    fed: int = 0  # prompt tokens that were put into the queue before it
    unread: deque[Reading] | None = None  # what is yet to be given out; None: the records were not read
    events: list[tuple[int, TokenEvent]] = field(default_factory=list)  # for requests without a sink, by place


def temporary_bytes(decoder: Decoder, params: Any, model: ModelConfig) -> Callable[[EngineConfig], int]:
    """Says how many bytes the largest step of an engine of a configuration needs while it runs."""

    def of(config: EngineConfig) -> int:
        state = jax.eval_shape(partial(empty_state, config, model))
        step = partial(programs.burst, decoder, budget=config.budgets[-1], steps=1, candidates=0)
        analysis = jax.jit(step, donate_argnums=1).lower(params, state).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    return of


class DeviceSide:
    """Holds the state of an engine and donates it to one program after the other.

    Args:
        config: nothing left open.
    """

    def __init__(self, decoder: Decoder, params: Any, model: ModelConfig, config: EngineConfig):
        self.decoder, self.params, self._model, self._config = decoder, params, model, config
        assert config.max_model_len is not None
        self._max_model_len = config.max_model_len
        #: The inputs of the state, and what its steps decided.
        self.trace = Trace(config, pool_shape(model)) if config.trace else None
        self.compile_seconds = 0.0
        self.bursts: dict[tuple[int, int], Any] = {}  # programs by token budget and candidates
        self._helpers: dict[Any, Any] = {}
        self.state: EngineState
        self.figures: Figures
        self._start_empty()
        self._shared: Programs | None = Programs.of(decoder, params, self.state)
        self._host_pool: HostPool | None = None
        #: Whether pages are on their way to or from the host: then the state does not say what is in them.
        self.moving = False
        if self.state.swap is not None:
            with self._compiling():
                self._host_pool = HostPool(self.state.pool, self.state.swap.num_chunks)

    # -- programs

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Keeps what is compiled for the next process, and counts the time."""
        start = time.perf_counter()
        with programs_kept(self._config.compilation_cache):
            yield
        self.compile_seconds += time.perf_counter() - start

    def steps(self, budget: int) -> int:
        """Steps in a burst. One that can hold a long prompt is followed by a look at what is wanted next."""
        return (self._config.steps_per_burst or 1) if budget <= self._config.max_num_seqs else 1

    def program(self, budget: int, candidates: int = 0) -> Any:
        """See `Engine.program`."""
        if (budget, candidates) not in self.bursts:
            with self._compiling():
                self.bursts[budget, candidates] = self._programs.burst(budget, self.steps(budget), candidates)
        return self.bursts[budget, candidates]

    @property
    def _programs(self) -> Programs:
        assert self._shared is not None
        return self._shared

    def _helper(self, function: Any, argument: Any) -> Any:
        if function not in self._helpers:
            with self._compiling():
                self._helpers[function] = self._programs.of_state(function, argument)
        return self._helpers[function]

    def to_compile(self) -> list[Callable[[], Any]]:
        """Compiles every program, one a call, but for those that offer candidates. The state is not touched."""
        submission = Submission.empty(SUBMIT_BATCH, self._max_model_len)
        helpers: list[tuple[Any, Any]] = [
            (programs.put, submission), (programs.drop, self._named([])),
            (programs.branch, branch(NO_REQUEST, NO_REQUEST, 0)),
        ]  # fmt: skip
        if self._host_pool is not None:
            helpers.append((programs.make_room, np.int32(1)))
        calls: list[Callable[[], Any]] = [partial(self.program, budget) for budget in self._config.budgets]
        return calls + [partial(self._helper, *helper) for helper in helpers]

    @property
    def num_programs(self) -> int:
        moving = 0 if self._host_pool is None else self._host_pool.num_programs
        return len(self.bursts) + len(self._helpers) + moving

    # -- what changes the state. A trace keeps it in the same order.

    def tell(self, given: Input) -> None:
        """Keeps what changed the state, for a replay."""
        if self.trace is not None:
            self.trace.inputs.append(given)

    def put(self, batch: Submission) -> None:
        """Puts the requests of a batch of SUBMIT_BATCH into the queue."""
        self.state, self.figures = self._helper(programs.put, batch)(self.state, batch)

    def _named(self, uids: list[int]) -> np.ndarray:
        named = np.full(self._config.max_num_seqs + self._config.max_queue, NO_REQUEST, np.int32)
        named[: len(uids)] = uids
        return named

    def drop(self, uids: list[int]) -> None:
        """Gives requests up; no request uses their pages afterwards."""
        named = self._named(uids)
        self.state, self.figures = self._helper(programs.drop, named)(self.state, named)

    def branch(self, uid: int, new_uid: int, seed: int) -> None:
        """See `jpaged.step.sharing.fork`."""
        forks = branch(uid, new_uid, seed)
        self.state, self.figures = self._helper(programs.branch, forks)(self.state, forks)

    def move_on(self, beams: np.ndarray) -> None:
        """See `jpaged.step.sharing.beam`; `[3, max_num_seqs]` int32."""
        three = tuple(beams)
        self.state, self.figures = self._helper(programs.move_on, three)(self.state, three)

    def exchange(self) -> None:
        """Moves pages to the host and back, as the state asks for. This waits for the burst before."""
        if self._host_pool is None:
            return
        ahead = np.int32(self._config.steps_per_burst or 1)
        self.moving = True
        self.state, (self.figures, moves) = self._helper(programs.make_room, ahead)(self.state, ahead)
        pool = self._host_pool.move(self.state.pool, jax.device_get(moves))
        self.state = replace(self.state, pool=pool)
        self.moving = False

    def launch(self, budget: int, candidates: int) -> Flight:
        """Starts a burst. It runs while the host goes on."""
        program = self.program(budget, candidates)
        self.state, records, self.figures = program(self.params, self.state)
        steps = self.steps(budget)
        told = None if self.trace is None else self.trace.begin_burst(budget, steps)
        return Flight(budget, steps, records, self.figures.demand, told)

    def forget_cached(self) -> None:
        """Makes all cached pages free."""
        prefixes = self.state.prefixes
        nothing = jax.device_put(np.zeros(prefixes.cached.shape, bool), prefixes.cached.sharding)
        self.state = replace(self.state, prefixes=replace(prefixes, cached=nothing))
        self.figures = replace(self.figures, cached=np.int32(0))

    def load(self, arrays: Any) -> None:
        """Takes the state that `pack_state` gave."""
        self.state = unpack_state(arrays, self.state)
        self.put(Submission.empty(SUBMIT_BATCH, self._max_model_len))  # for the figures

    # -- a state that is lost

    @property
    def intact(self) -> bool:
        """Whether the state is there, and not the result of a computation that failed. Waits for the device."""
        leaves = jax.tree.leaves(self.state)
        if self.moving or any(leaf.is_deleted() for leaf in leaves):
            return False
        try:
            jax.block_until_ready(leaves)
        except RuntimeError:
            return False
        return True

    def start_again(self, unread: list[Flight]) -> None:
        """Makes an empty state in the place of one that is lost, with bursts that are not read any more."""
        if self.trace is not None:
            self.trace.forget_bursts([flight.told for flight in unread if flight.told is not None])
        self.free()  # first: the device has no room for two pools
        self._start_empty()
        self.moving = False

    def _start_empty(self) -> None:
        with programs_kept(self._config.compilation_cache):
            self.state = empty_state(self._config, self._model)
        self.tell(Restart())
        self.figures = self.nothing()

    def nothing(self) -> Figures:
        """The figures of an empty state."""
        nothing, pages = np.int32(0), np.int32(self._config.num_pages or 0)
        return Figures(nothing, nothing, nothing, pages, nothing)

    def free(self) -> None:
        """Frees the state's memory."""
        for leaf in jax.tree.leaves(self.state):
            if not leaf.is_deleted():
                leaf.delete()

    def close(self) -> None:
        """Frees all memory, and lets go of the programs. Twice is harmless."""
        self.free()
        if self._host_pool is not None:
            self._host_pool.close()
        self.params = self._shared = None
        self.bursts.clear()
        self._helpers.clear()
