"""The host's side of the engine: requests in, bursts run, tokens out.

The engine is `EngineState`, a value on the device; this class holds the current one, gives it to a compiled burst
(donated, so that the pool is updated in place) and keeps what comes back. It decides nothing about scheduling. The
one choice it makes is which compiled program to run: one whose token budget holds the tokens the device says the next
step would compute, with little padding. Any choice gives the same tokens.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.config import EngineConfig
from jpaged.models.spec import ModelConfig
from jpaged.pool import Decoder
from jpaged.record import saving
from jpaged.record.inputs import Abort, Fork, Input, ReplaceParams, ResetPrefixCache, Restart, Submit
from jpaged.record.snapshot import pack_state, unpack_state
from jpaged.record.stats import EngineStats, StepStats, TokenEvent
from jpaged.record.trace import Trace, TracedRequest
from jpaged.request import FinishReason, Request
from jpaged.runtime import programs
from jpaged.runtime.host_pool import HostPool
from jpaged.runtime.prepare import Namespaces, branch, check_request, fill_row
from jpaged.runtime.resolve import empty_state, pool_shape, resolve
from jpaged.step import (
    NO_UID,
    EngineState,
    Finish,
    Status,
    Submission,
)

logger = logging.getLogger("jpaged")

#: Requests that one call puts into the state; a static shape.
_SUBMIT_BATCH = 16
#: Steps whose figures `Engine.history` keeps.
_HISTORY = 100_000
#: Cache salts that are known at a time, or as many as there are pages.
_NAMESPACES = 1024

FINISH_REASONS = {
    Finish.STOP: FinishReason.STOP,
    Finish.LENGTH: FinishReason.LENGTH,
    Finish.ERROR: FinishReason.ERROR,
}


@dataclass
class _Held:
    """A request that has not ended."""

    request: Request
    uids: list[int]  # of its continuations that have not ended
    events: list[TokenEvent] = field(default_factory=list)  # what came out so far


class Engine:
    """Continuous batching over a paged KV cache.

    Args:
        decoder: the model; static and hashable.
        params: its weights.
        model_config: its shapes.
        config: the engine's. What it leaves open (None, "auto") is filled in; `engine.config` is the result.
            `dtype` is that of the pool.

    Raises:
        ValueError: for sizes that do not fit each other, the model, or the device.
    """

    def __init__(self, decoder: Decoder, params: Any, model_config: ModelConfig, config: EngineConfig):
        self.model_config = model_config
        self._decoder = decoder
        self._params = params
        self._seeds = np.random.default_rng(config.seed)
        self._programs: dict[tuple[int, int], Any] = {}  # by token budget and candidates
        self._helpers: dict[Any, Any] = {}
        self._held: dict[str, _Held] = {}  # by request id
        self._requests: dict[int, Request] = {}  # by uid, each of one continuation that has not ended
        self._pending: list[int] = []  # uids that wait on the host, by priority and then in order
        self._on_device: set[int] = set()
        self._next_uid = 0
        self._namespaces = Namespaces()
        self.weight_version = 0
        self.compile_seconds = 0.0
        self.config = resolve(config, model_config, params, self._temporary_bytes)
        assert self.config.num_pages is not None and self.config.max_model_len is not None
        self.num_pages, self.max_model_len = self.config.num_pages, self.config.max_model_len
        #: What the engine was told and what its steps decided, where `config.trace` asks for it.
        self.trace = Trace(self.config, pool_shape(model_config)) if config.trace else None
        self._start_empty()
        self._host_pool: HostPool | None = None
        if self.config.preemption != "recompute":
            assert self._state.swap is not None
            start = time.perf_counter()
            self._host_pool = HostPool(self._state.pool, self._state.swap.num_chunks)
            self.compile_seconds += time.perf_counter() - start
        self.history: deque[StepStats] = deque(maxlen=_HISTORY)
        self._totals = dict.fromkeys(
            ("steps", "useful", "wasted", "preemptions", "swaps", "prefix_queries", "prefix_hits"), 0
        )  # fmt: skip

    def _make_state(self, config: EngineConfig) -> EngineState:
        return empty_state(config, self.model_config)

    def _temporary_bytes(self, config: EngineConfig) -> int:
        """Bytes that the largest step of an engine of `config` needs while it runs."""
        return self._lower(config, config.budgets[-1]).compile().memory_analysis().temp_size_in_bytes

    def _tell(self, told: Input) -> None:
        """Keeps what the state was told, for a replay."""
        if self.trace is not None:
            self.trace.inputs.append(told)

    # -- programs

    def _lower(self, config: EngineConfig, budget: int, candidates: int = 0) -> Any:
        state = jax.eval_shape(partial(self._make_state, config))
        steps = self._steps(config, budget)
        return programs.burst.lower(
            self._decoder, self._params, state, budget=budget, steps=steps, candidates=candidates
        )  # fmt: skip

    @staticmethod
    def _steps(config: EngineConfig, budget: int) -> int:
        """Steps in a burst. One that can hold a long prompt is followed by a look at what is wanted next."""
        return (config.steps_per_burst or 1) if budget <= config.max_num_seqs else 1

    def program(self, budget: int, candidates: int = 0) -> Any:
        """The compiled burst of a token budget, which offers so many candidates to requests that are held: (parameters,
        state) -> (state, records, demand); see `step.run`. The state is donated. Compiled the first time."""
        if (budget, candidates) not in self._programs:
            start = time.perf_counter()
            self._programs[budget, candidates] = self._lower(self.config, budget, candidates).compile()
            self.compile_seconds += time.perf_counter() - start
        return self._programs[budget, candidates]

    def _helper(self, function: Any, argument: Any) -> Any:
        """Runs a small program on the state, compiled the first time."""
        if function not in self._helpers:
            start = time.perf_counter()
            self._helpers[function] = function.lower(self._state, argument).compile()
            self.compile_seconds += time.perf_counter() - start
        return self._helpers[function](self._state, argument)

    def warmup(self) -> None:
        """Compiles every program there is, so that none is compiled while requests wait; but for those that offer
        candidates, of which there is one for each number of them."""
        for budget in self.config.budgets:
            self.program(budget)
        self._put(Submission.empty(_SUBMIT_BATCH, self.max_model_len))
        self._drop([])
        self._branch(NO_UID, NO_UID, 0)
        self._exchange()

    @property
    def num_programs(self) -> int:
        """Programs compiled so far. After `warmup` it grows only when candidates are asked for."""
        moving = 0 if self._host_pool is None else self._host_pool.num_programs
        return len(self._programs) + len(self._helpers) + moving

    def program_text(self, budget: int) -> str:
        """The compiled program of a token budget, as HLO text."""
        return self.program(budget).as_text()

    def burst_steps(self, budget: int) -> int:
        """Steps that a burst of that token budget runs."""
        return self._steps(self.config, budget)

    # -- requests in

    def check(self, request: Request) -> None:
        """Raises ValueError, in words, if `request` can never run here. Nothing is changed."""
        config = self.config
        check_request(
            request, self.model_config, max_model_len=self.max_model_len, page_size=config.page_size,
            num_pages=self.num_pages,
        )  # fmt: skip

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: it can never run here (see `check`), or its id is in use.
        """
        self.check(request)
        if request.request_id in self._held:
            raise ValueError(f"request id {request.request_id!r} is in use by a request that has not ended")
        uids = range(self._next_uid + 1, self._next_uid + 1 + request.params.n)
        self._next_uid = uids[-1]
        self._hold(request, uids)
        for uid in uids:
            self._wait(uid)

    def fork(self, request_id: str, new_request_id: str, *, index: int = 0, seed: int | None = None) -> None:
        """Branches a running generation: a new request with all that continuation `index` of `request_id` has by now,
        and with its rules, which goes on by itself. Its events begin with the next token. Pages are shared; see
        `jpaged.step.sharing.fork`.

        Args:
            seed: of the new request from here on; None: the engine draws one.

        Raises:
            ValueError: there is no such continuation in the state, as it has ended or waits on the host still; the new
                id is in use; or the state has no room for another request.
        """
        names = {self._requests[uid].index: uid for uid in self._uids(request_id) if uid in self._on_device}
        if index not in names:
            raise ValueError(
                f"continuation {index} of request {request_id!r} cannot be branched: those that have begun and not "
                f"ended are {sorted(names)}"
            )
        if new_request_id in self._held:
            raise ValueError(f"request id {new_request_id!r} is in use by a request that has not ended")
        rows = self.config.max_num_seqs + self.config.max_queue
        if len(self._on_device) >= rows:
            raise ValueError(f"all {rows} rows (max_num_seqs + max_queue) have requests; abort one, or let one end")
        request = self._requests[names[index]]
        seed = int(self._seeds.integers(2**32)) if seed is None else seed
        params = replace(request.params, seed=seed)
        self._next_uid += 1
        self._branch(names[index], self._next_uid, seed)
        self._tell(Fork(names[index], self._next_uid, seed))
        self._hold(replace(request, request_id=new_request_id, params=params, index=0), [self._next_uid])
        self._on_device.add(self._next_uid)

    def advance(self, request_id: str, moves: Sequence[tuple[int, int]]) -> None:
        """Lets a request with candidates go on: its continuation i is from now on what continuation `moves[i][0]` is,
        and the token `moves[i][1]` after it. All of these have been offered candidates since they last went on."""
        if self.trace is not None:
            raise ValueError("a trace has no place for what becomes of beams: use an engine without one")
        uids = {self._requests[uid].index: uid for uid in self._uids(request_id)}
        size = self.config.max_num_seqs
        beams = np.full((3, size), NO_UID, np.int32)
        for index, (source, token) in enumerate(moves):
            beams[:, index] = uids[index], uids[source], token
        self._state, self._demand = self._helper(programs.move_on, tuple(beams))

    def _branch(self, uid: int, new_uid: int, seed: int) -> None:
        self._state, self._demand = self._helper(programs.branch, branch(uid, new_uid, seed))

    def _hold(self, request: Request, uids: Sequence[int], indices: Sequence[int] | None = None) -> None:
        """Continuation `indices[i]` of `request`, or number i, has the uid `uids[i]`."""
        self._held[request.request_id] = _Held(request, list(uids))
        each = request.continuations()
        self._requests |= {uid: each[index] for uid, index in zip(uids, indices or range(len(uids)), strict=True)}
        if self.trace is not None:
            for uid in uids:
                name, prompt = self.label(uid), self._requests[uid].prompt_token_ids
                self.trace.requests[uid] = TracedRequest(str(name), len(prompt), len(self.trace))

    def _uids(self, request_id: str) -> list[int]:
        held = self._held.get(request_id)
        return held.uids if held else []

    def _wait(self, uid: int) -> None:
        bisect.insort(self._pending, uid, key=lambda uid: (self._requests[uid].priority, uid))

    def _feed(self) -> None:
        """Moves requests from the host's queue into free rows of the state."""
        rows = self.config.max_num_seqs + self.config.max_queue
        while self._pending and len(self._on_device) < rows:
            batch = Submission.empty(_SUBMIT_BATCH, self.max_model_len)
            for place in range(min(_SUBMIT_BATCH, len(self._pending), rows - len(self._on_device))):
                uid = self._pending.pop(0)
                request = self._requests[uid]
                others = (other for other in self._uids(request.request_id) if other in self._on_device)
                parent = next(others, NO_UID)
                self._on_device.add(uid)
                fill_row(
                    batch, place, uid, request, self.model_config, max_model_len=self.max_model_len,
                    seed=int(self._seeds.integers(2**32)),
                    namespace=self._namespaces.number(
                        request.cache_salt, self.weight_version, most=max(_NAMESPACES, self.num_pages)
                    ),
                    parent=parent,
                )  # fmt: skip
            self._put(batch)
            self._tell(Submit.of(batch))

    def _exchange(self) -> None:
        """Moves pages to the host and back, as the state asks for; before each burst."""
        if self._host_pool is None:
            return
        ahead = np.int32(self.config.steps_per_burst or 1)
        self._state, (self._demand, moves) = self._helper(programs.make_room, ahead)
        pool = self._host_pool.move(self._state.pool, jax.device_get(moves))
        self._state = replace(self._state, pool=pool)

    def _put(self, batch: Submission) -> None:
        self._state, self._demand = self._helper(programs.put, batch)

    # -- bursts

    @property
    def has_work(self) -> bool:
        """Whether some request has not ended."""
        return bool(self._requests)

    def burst(self) -> list[TokenEvent]:
        """Runs one burst and returns what came out, step by step. Without work it returns at once.

        If the device fails, or the call is interrupted, the exception passes on and every request is lost; the
        engine is empty again and can be used.
        """
        try:
            return self._burst()
        except BaseException:
            if self.trace is None:
                self.abort_all()
            else:  # which may lack what the state was told last
                self._reset()
            raise

    def _burst(self) -> list[TokenEvent]:
        events = self._too_long_to_start()
        if not self.has_work:
            return events
        self._feed()
        self._exchange()
        candidates = self._candidates()
        budget = self._budget(int(self._demand), candidates)
        program = self.program(budget, candidates)
        self._state, records, self._demand = program(self._params, self._state)
        records = jax.device_get(records)
        if self.trace is not None:
            self.trace.add_burst(budget, records)
        events += self._read(records, budget)
        for event in events:
            if event.request_id in self._held:  # else it has ended
                self._held[event.request_id].events.append(event)
        return events

    def _candidates(self) -> int:
        """Those that the next burst offers: a power of two, so that there are few programs, or the vocabulary."""
        most = max((self._requests[uid].candidates for uid in self._on_device), default=0)
        return min(1 << (most - 1).bit_length(), self.model_config.vocab_size) if most else 0

    def _budget(self, wanted: int, candidates: int) -> int:
        """The token budget for a step that would compute `wanted` tokens: the smallest compiled one that holds them,
        unless more than half of it would be padding; then the smallest there is, which is compiled first."""
        best = next((b for b in self.config.budgets if b >= wanted), self.config.budgets[-1])
        compiled = min((b for b, c in self._programs if b >= best and c == candidates), default=best)
        return compiled if compiled <= 2 * wanted else best

    def _too_long_to_start(self) -> list[TokenEvent]:
        """A prompt of exactly max_model_len tokens leaves no room: it ends by length before it runs."""
        full = [u for u in self._pending if len(self._requests[u].prompt_token_ids) == self.max_model_len]
        if not full:
            return []
        self._pending = [uid for uid in self._pending if uid not in set(full)]
        self._tell(Abort(tuple(full)))
        ended = (self._requests[uid] for uid in full)
        events = [TokenEvent(r.request_id, None, 0.0, FinishReason.LENGTH, index=r.index) for r in ended]
        for uid in full:
            self._forget(uid)
        return events

    def _read(self, records: Any, budget: int) -> list[TokenEvent]:
        events = []
        for index in range(records.uid.shape[0]):
            record = jax.tree.map(lambda a, i=index: a[i], records)
            self._note(record, budget)
            for slot in np.flatnonzero(record.sampled | record.offered | (record.finish != Finish.NOT)):
                events.append(self._event(record, int(slot)))
        return events

    def _event(self, record: Any, slot: int) -> TokenEvent:
        uid = int(record.uid[slot])
        request = self._requests[uid]
        token = int(record.token[slot]) if record.sampled[slot] else None
        finish = Finish(int(record.finish[slot]))
        stop_reason = token if finish == Finish.STOP and token in request.params.stop_token_ids else None
        candidates = None
        if record.offered[slot]:
            offers = record.candidates[slot], record.candidate_logprobs[slot]
            candidates = tuple(array[: request.candidates].tolist() for array in offers)
        if finish != Finish.NOT:
            self._forget(uid)
        return TokenEvent(
            request.request_id, token, float(record.logprob[slot]), FINISH_REASONS.get(finish), stop_reason,
            int(record.cached_tokens[slot]), request.index, candidates,
        )  # fmt: skip

    def _note(self, record: Any, budget: int) -> None:
        computed = int(record.scheduled.sum())
        lost = int(record.discarded) - int(record.recovered)  # by preemption: computed once in vain
        self._totals["steps"] += 1
        self._totals["useful"] += computed - lost
        self._totals["wasted"] += budget - computed + lost
        self._totals["preemptions"] += int(record.preempted)
        self._totals["swaps"] += int(record.to_host.sum())
        self._totals["prefix_queries"] += int(record.prefix_queries)
        self._totals["prefix_hits"] += int(record.prefix_hits)
        self.history.append(StepStats.of(record, self._totals["steps"], budget, pending=len(self._pending)))

    def _forget(self, uid: int) -> None:
        name = self._requests.pop(uid).request_id
        uids = self._held[name].uids
        uids.remove(uid)
        if not uids:
            del self._held[name]
        self._on_device.discard(uid)

    # -- requests out

    def abort(self, request_ids: Sequence[str]) -> None:
        """Gives requests up, waiting or running; nobody uses their pages when this returns. Unknown ids are ignored:
        a request may have ended a moment ago."""
        uids = {uid for name in request_ids for uid in self._uids(name)}
        on_device = [uid for uid in uids if uid in self._on_device]
        self._pending = [uid for uid in self._pending if uid not in uids]
        for uid in uids:
            self._forget(uid)
        if uids:
            self._tell(Abort(tuple(sorted(uids))))
        if on_device:
            self._drop(on_device)

    def _drop(self, uids: Sequence[int]) -> None:
        named = np.full(self.config.max_num_seqs + self.config.max_queue, NO_UID, np.int32)
        named[: len(uids)] = uids
        self._state, self._demand = self._helper(programs.drop, named)

    def abort_all(self) -> None:
        """Gives everything up. Also what makes an engine whose burst failed usable again."""
        deleted = any(leaf.is_deleted() for leaf in jax.tree.leaves((self._state, self._demand)))
        if not deleted:
            try:
                self.abort(list(self._held))
                jax.block_until_ready(self._state)
                return
            except RuntimeError as error:  # what a failed computation left behind fails when it is used
                logger.warning("The engine's state is lost (%s); it starts again empty", error)
        self._reset()

    def _reset(self) -> None:
        self._free_state()  # first: the device has no room for two pools
        self._start_empty()

    def _free_state(self) -> None:
        for leaf in jax.tree.leaves(self._state):
            if not leaf.is_deleted():
                leaf.delete()

    def _start_empty(self) -> None:
        self._state = self._make_state(self.config)
        self._tell(Restart())
        self._demand = jnp.int32(0)
        self._held.clear()
        self._requests.clear()
        self._pending.clear()
        self._on_device.clear()

    # -- what pages hold

    def reset_prefix_cache(self) -> bool:
        """Makes all cached pages free. Returns False, and does nothing, while requests run: their pages are in use."""
        if np.asarray(self._state.slots.occupied).any():
            return False
        prefixes = self._state.prefixes
        nothing = jax.device_put(np.zeros(prefixes.cached.shape, bool), prefixes.cached.sharding)
        self._state = replace(self._state, prefixes=replace(prefixes, cached=nothing))
        self._tell(ResetPrefixCache())
        return True

    def replace_params(self, params: Any) -> None:
        """Takes other weights of the same shapes. What was computed with the old ones is never found again.

        Raises:
            RuntimeError: while requests have not ended.
            ValueError: for weights of another structure, shape or dtype. The old ones stay.
        """
        if self.has_work:
            raise RuntimeError(f"weights cannot be replaced while {len(self._requests)} requests have not ended")

        def fitted(path, was, now):
            if (was.shape, was.dtype) != (now.shape, now.dtype):
                raise ValueError(
                    f"the new weight {jax.tree_util.keystr(path)} is {now.dtype}{now.shape}, not {was.dtype}{was.shape}"
                )
            return jax.device_put(now, was.sharding)

        self._params = jax.tree_util.tree_map_with_path(fitted, self._params, params)
        self.weight_version += 1
        self._tell(ReplaceParams())
        self.reset_prefix_cache()

    # -- saved and restored

    def save_state(self, directory: str | Path, files: Mapping[str, str] | None = None) -> Path:
        """Saves what runs and waits, and what is cached, so that another engine can go on with it. This one goes on as
        if nothing had been. `history` is not saved.

        Args:
            directory: a new one; it appears complete or not at all.
            files: texts to keep with it, by plain file name.

        A trace is not saved, and what goes on keeps none.

        Returns:
            The directory, absolute.

        Raises:
            ValueError: something is already there, or a request with candidates has not ended.
        """
        if held := [request.request_id for request in self._requests.values() if request.candidates]:
            raise ValueError(f"a search that waits to be told how it goes on cannot be saved: request {held[0]!r}")
        host = saving.HostState(
            requests=tuple(self._saved(held) for held in self._held.values()),
            next_uid=self._next_uid,
            seeds=dict(self._seeds.bit_generator.state),
            namespaces=self._namespaces.to_json(),
            weight_version=self.weight_version,
            totals=dict(self._totals),
        )
        state = replace(self._state, record=replace(self._state.record, decisions=None))
        config = replace(self.config, trace=False)
        return saving.save(
            directory, pack_state(state), host, config=config, model=self.model_config, params=self._params,
            files=files,
        )  # fmt: skip

    def _saved(self, held: _Held) -> saving.HeldRequest:
        return saving.HeldRequest(
            request=held.request,
            uids=tuple(held.uids),
            indices=tuple(self._requests[uid].index for uid in held.uids),
            pending=tuple(uid for uid in held.uids if uid not in self._on_device),
            events=tuple(held.events),
        )

    def load_state(self, saved: saving.Saved) -> None:
        """Goes on with what another engine saved. All tokens are those that it would have given; what this one has
        cached is forgotten.

        Args:
            saved: of an engine of the same model, weights and sizes; what may differ is in `saving.FREE_FIELDS`. Cached
                pages that find no room are left out.

        Raises:
            RuntimeError: while requests have not ended here.
            ValueError: it does not fit this engine, or is damaged. Nothing has been changed then but the cache.
        """
        if self.has_work:
            raise RuntimeError(
                f"a state cannot be loaded while {len(self._requests)} requests have not ended; use a new engine"
            )
        saved.check(self.config, self.model_config, self._params)
        host, arrays = saved.host, saved.arrays
        on_device = {uid for held in host.requests for uid in held.uids if uid not in held.pending}
        if (live := set(arrays["requests.uid"][arrays["requests.status"] != Status.FREE].tolist())) != on_device:
            raise ValueError(
                f"{saved.path} is damaged: its state holds the requests {sorted(live)}, and {saving.ENGINE_FILE} says "
                f"{sorted(on_device)}"
            )
        namespaces = Namespaces.from_json(host.namespaces)
        self.reset_prefix_cache()
        try:
            self._state = unpack_state(arrays, self._state)
        except BaseException:
            self.abort_all()
            raise
        for held in host.requests:
            self._hold(held.request, held.uids, held.indices)
            self._held[held.request.request_id].events.extend(held.events)
            for uid in held.pending:
                self._wait(uid)
        self._on_device = on_device
        self._next_uid, self.weight_version, self._namespaces = host.next_uid, host.weight_version, namespaces
        self._seeds.bit_generator.state = host.seeds
        self._totals = dict(host.totals)
        self._put(Submission.empty(_SUBMIT_BATCH, self.max_model_len))  # says what the next step would compute

    def unfinished(self) -> list[tuple[Request, list[TokenEvent]]]:
        """The requests that have not ended, in the order of submission, and what came out of each so far."""
        return [(held.request, list(held.events)) for held in self._held.values()]

    # -- a look inside

    @property
    def state(self) -> EngineState:
        """The current state. The next burst takes its buffers: copy what is to be kept."""
        return self._state

    def label(self, uid: int) -> str | None:
        """The id of the request that the state knows as `uid`, and the number of the continuation if there are several;
        None if it has ended."""
        if uid not in self._requests:
            return None
        request = self._requests[uid]
        several = self._held[request.request_id].request.params.n > 1
        return f"{request.request_id}.{request.index}" if several else request.request_id

    @property
    def params(self) -> Any:
        return self._params

    @property
    def decoder(self) -> Decoder:
        return self._decoder

    def stats(self) -> EngineStats:
        """Totals, and pages as the reference counts on the device say."""
        available, cached = int(self._state.available_pages), int(self._state.cached_pages)
        running = int(np.sum(np.asarray(self._state.slots.occupied)))
        return EngineStats(
            steps=self._totals["steps"],
            useful_row_steps=self._totals["useful"],
            wasted_row_steps=self._totals["wasted"],
            preemptions=self._totals["preemptions"],
            swaps=self._totals["swaps"],
            total_pages=self.num_pages,
            free_pages=available - cached,
            in_use_pages=self.num_pages - available,
            running=running,
            waiting=len(self._requests) - running,
            num_programs=self.num_programs,
            compile_seconds=self.compile_seconds,
            cached_pages=cached,
            prefix_queries=self._totals["prefix_queries"],
            prefix_hits=self._totals["prefix_hits"],
        )

    def close(self) -> None:
        """Frees the pool and lets go of weights and programs. Twice is harmless."""
        self._free_state()
        if self._host_pool is not None:
            self._host_pool.close()
        self._params = None
        self._programs.clear()
        self._helpers.clear()

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{f.name}={getattr(self.config, f.name)}"
            for f in fields(self.config)
            if f.name in ("page_size", "num_pages", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "dtype")
        )
        return f"Engine({type(self._decoder).__name__}, {shown})"
