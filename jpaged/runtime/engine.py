"""The engine as callers use it: requests in and out, weights, saved states, and a look inside.

`jpaged.runtime.core` has the loop that runs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpaged.pool import Decoder
from jpaged.record import saving
from jpaged.record.inputs import Fork, ReplaceParams, ResetPrefixCache
from jpaged.record.stats import EngineStats, TokenEvent
from jpaged.record.trace import Trace
from jpaged.request import FinishReason, Request
from jpaged.runtime import persist
from jpaged.runtime.books import Sink
from jpaged.runtime.core import EngineCore
from jpaged.runtime.prepare import Namespaces, check_request
from jpaged.step import NO_REQUEST, EngineState


class Engine(EngineCore):
    """Continuous batching over a paged KV cache.

    Args:
        decoder: the model; static and hashable.
        params: its weights.
        model_config: its shapes.
        config: the engine's. What it leaves open (None, "auto") is filled in; `engine.config` is the result.
            Its `pool_dtype` is that of the pool.

    Raises:
        ValueError: for sizes that do not fit each other, the model, or the device.
    """

    # -- programs

    def program(self, budget: int, candidates: int = 0) -> Any:
        """The compiled burst of a token budget, which offers so many candidates to requests that are held: (parameters,
        state) -> (state, records, figures); see `step.run`. The state is donated. Compiled the first time."""
        return self.device.program(budget, candidates)

    def warmup(self, *, use_tqdm: bool = False) -> None:
        """Compiles every program there is, so that none is compiled while requests wait; but for those that offer
        candidates, of which there is one for each number of them. Requests run on meanwhile.

        Args:
            use_tqdm: show a progress bar that counts programs.
        """
        self._check_usable()
        from tqdm.std import tqdm  # here, for an engine without a bar needs it not

        calls = self.device.to_compile()
        with tqdm(total=len(calls), unit="program", disable=not use_tqdm, dynamic_ncols=True) as bar:
            for number, compile_one in enumerate(calls, 1):
                bar.set_description(f"Compiling program {number} of {len(calls)}")
                compile_one()
                bar.update(1)

    @property
    def num_programs(self) -> int:
        """Programs compiled so far. After `warmup` it grows only when candidates are asked for."""
        return self.device.num_programs

    @property
    def compile_seconds(self) -> float:
        """Seconds that compiling took."""
        return self.device.compile_seconds

    def program_text(self, budget: int) -> str:
        """The compiled program of a token budget, as HLO text."""
        return self.program(budget).as_text()

    def burst_steps(self, budget: int) -> int:
        """Steps that a burst of that token budget runs."""
        return self.device.steps(budget)

    # -- requests in

    def check(self, request: Request) -> None:
        """Raises ValueError, in words, if `request` can never run here, and RuntimeError if nothing can, because the
        engine has no whole weights. Nothing is changed."""
        self._check_weights()
        check_request(
            request, self.model_config, max_model_len=self.max_model_len, page_size=self.config.page_size,
            num_pages=self.num_pages,
        )  # fmt: skip

    def submit(self, request: Request, sink: Sink | None = None) -> None:
        """Queues a request. It waits for no burst.

        Args:
            sink: takes a `Piece` for each burst in which the request got something. None: `burst` returns its events.

        Raises:
            ValueError: it can never run here (see `check`), or its id is in use.
            RuntimeError: the engine was closed, or made in another process.
        """
        self._check_usable()
        self.check(request)
        with self._writing:
            self._check_new(request.request_id)
            uids = range(self._next_uid + 1, self._next_uid + 1 + request.params.n)
            self._next_uid = uids[-1]
            for row in self._open(request, uids, sink):
                if len(request.prompt_token_ids) == self.max_model_len:
                    self._full.append(row)
                else:
                    self._wait(row)

    def _check_new(self, request_id: str) -> None:
        if request_id in self._books.held:
            raise ValueError(f"request id {request_id!r} is in use by a request that has not ended")

    def fork(self, request_id: str, new_request_id: str, *, index: int = 0, seed: int | None = None) -> tuple[int, ...]:
        """Branches a running generation: a new request with all that continuation `index` of `request_id` has by now,
        and with its rules, which goes on by itself. Its events begin with the next token. Pages are shared; see
        `jpaged.step.sharing.fork`. By now: where the engine runs ahead, the next `burst` gives out what it has more.

        Args:
            seed: of the new request from here on; None: the engine draws one.

        Returns:
            The generated tokens that the new request begins with.

        Raises:
            ValueError: there is no such continuation in the state, as it has ended or waits on the host still; the new
                id is in use; or the state has no room for another request.
        """
        with self.paused(), self._writing:
            names = {row.request.index: row for row in self._books.rows_of(request_id) if row.on_device}
            if index not in names:
                raise ValueError(
                    f"continuation {index} of request {request_id!r} cannot be branched: those that have begun and not "
                    f"ended are {sorted(names)}"
                )
            self._check_new(new_request_id)
            if (rows := self._free_rows()) < 1:
                rows = self.config.max_num_seqs + self.config.max_queue
                raise ValueError(f"all {rows} rows (max_num_seqs + max_queue) have requests; abort one, or let one end")
            parent = names[index]
            seed = int(self._seeds.integers(2**32)) if seed is None else seed
            params = replace(parent.request.params, seed=seed)
            self._next_uid += 1
            self.device.branch(parent.uid, self._next_uid, seed)
            self.device.tell(Fork(parent.uid, self._next_uid, seed))
            request = replace(parent.request, request_id=new_request_id, params=params, index=0)
            (row,) = self._open(request, [self._next_uid])
            row.before = tuple(parent.generated)
            self._books.put_on(row)
            del self._books.fresh[row.uid]  # it stays: what it begins with is on the device
            return row.before

    def advance(self, request_id: str, moves: Sequence[tuple[int, int]]) -> None:
        """Lets a request with candidates go on: its continuation i is from now on what continuation `moves[i][0]` is,
        and the token `moves[i][1]` after it. All of these have been offered candidates since they last went on."""
        if self.device.trace is not None:
            raise ValueError("a trace has no place for what becomes of beams: use an engine without one")
        with self.paused():
            uids = {row.request.index: row.uid for row in self._books.rows_of(request_id)}
            beams = np.full((3, self.config.max_num_seqs), NO_REQUEST, np.int32)
            for index, (source, token) in enumerate(moves):
                beams[:, index] = uids[index], uids[source], token
            self.device.move_on(beams)

    # -- requests out

    def abort(self, request_ids: str | Sequence[str], *, index: int | None = None) -> None:
        """Gives requests up, waiting or running; no request uses their pages when this returns. Unknown ids are
        ignored: a request may have ended a moment ago. A sink gets a last piece, which says so.

        Args:
            request_ids: one id or several.
            index: of the one continuation to give up; None: all.
        """
        self._check_usable()
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        with self._turns:
            self._check_usable()
            self._drop_abandoned()
            self._abort(names, index)

    def abandon(self, request_ids: Sequence[str]) -> None:
        """Gives requests up whose sinks are not read any more: at once if no thread uses the engine, else before the
        next burst. Never waits, so that the garbage collector can call it at any place."""
        self._abandoned.extend(request_ids)
        if not self._broken and os.getpid() == self._process and self._turns.take_if_free():
            try:
                self._drop_abandoned()
            finally:
                self._turns.__exit__()

    def abort_all(self) -> None:
        """Gives every request up, and what `burst` would have returned. An engine whose state is lost starts again."""
        with self._turns:
            intact = self.device.intact
            if intact:
                self._abort(list(self._books.held), None)
                intact = self.device.intact
            with self._writing:
                for row in self._books:
                    self._end(row, FinishReason.ABORT)
                self._queue.clear()
                if not intact:
                    self.device.start_again(list(self._flights))
                    self._flights.clear()
        with self.paused():
            self._events.clear()

    # -- what pages hold

    def reset_prefix_cache(self) -> bool:
        """Makes all cached pages free. Returns False, and does nothing, while requests run: their pages are in use."""
        with self.paused() as state:
            if np.asarray(state.slots.occupied).any():
                return False
            self.device.forget_cached()
            self.device.tell(ResetPrefixCache())
            return True

    def replace_params(self, params: Any) -> None:
        """Takes other weights of the same shapes. What was computed with the old ones is never found again.

        Raises:
            RuntimeError: while requests have not ended.
            ValueError: for weights of another structure, shape or dtype. The old ones stay.
        """
        with self.paused():
            self._refuse_while_running()

            def fitted(path, was, now):
                if (was.shape, was.dtype) != (now.shape, now.dtype):
                    name = jax.tree_util.keystr(path)
                    raise ValueError(f"the new weight {name} is {now.dtype}{now.shape}, not {was.dtype}{was.shape}")
                return jax.device_put(now, was.sharding)

            self.device.params = jax.tree_util.tree_map_with_path(fitted, self.device.params, params)
            self._weights_lost = None
            self._forget_weights()

    def update_params(self, update: Callable[[Any], Any]) -> None:
        """Takes what `update` makes of the weights in use, which it may delete one by one: so two models are never in
        memory. What was computed with the old ones is never found again.

        Args:
            update: from parameters to parameters of the same structure, shapes and dtypes.

        Raises:
            RuntimeError: while requests have not ended. Nothing has changed then.
            BaseException: what `update` raises. The engine has no whole model then, and refuses requests until
                `update_params` or `replace_params` has given it one.
        """
        with self.paused():
            self._refuse_while_running()
            self._forget_weights()
            try:
                self.device.params = update(self.device.params)
            except BaseException as error:
                self._weights_lost = f"{type(error).__name__}: {error}"
                error.add_note(
                    "The engine has no usable weights now: replace them again, from a checkpoint that can be read."
                )
                raise
            self._weights_lost = None

    def _refuse_while_running(self) -> None:
        if self._books.rows:
            count = len(self._books.rows)
            raise RuntimeError(f"weights cannot be replaced while {count} requests have not ended")

    def _forget_weights(self) -> None:
        """From now on nothing is found of what was computed so far."""
        self.weight_version += 1
        self.device.tell(ReplaceParams())
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
        with self.paused() as state:
            host = saving.HostState(
                requests=persist.held_requests(self._books),
                next_uid=self._next_uid,
                seeds=dict(self._seeds.bit_generator.state),
                namespaces=self._namespaces.to_json(),
                weight_version=self.weight_version,
                totals=dict(self._totals),
            )
            return persist.save(directory, state, host, self.config, self.model_config, self.params, files)

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
        with self.paused(), self._writing:
            if self._books.rows:
                raise RuntimeError(
                    f"a state cannot be loaded while {len(self._books.rows)} requests have not ended; use a new engine"
                )
            saved.check(self.config, self.model_config, self.params)
            host, seeds = saved.host, persist.seeds_of(saved)
            namespaces = Namespaces.from_json(host.namespaces)
            self.reset_prefix_cache()
            try:
                self.device.load(saved.arrays)
            except BaseException:
                self.abort_all()
                raise
            for held in host.requests:
                rows = self._open(held.request, held.uids, indices=held.indices)
                persist.fill(rows, self._books.held[held.request.request_id].progress, held, seeds)
                for row in rows:
                    if row.uid in held.pending:
                        self._wait(row)
                    else:
                        self._books.put_on(row)
                        del self._books.fresh[row.uid]  # whether it has begun is not saved: it stays
            self._next_uid, self.weight_version, self._namespaces = host.next_uid, host.weight_version, namespaces
            self._seeds.bit_generator.state = host.seeds
            self._totals = dict(host.totals)

    def unfinished(self) -> list[tuple[Request, list[TokenEvent]]]:
        """The requests that have not ended, in the order of submission, and what came out of each so far."""
        with self._writing:
            return [(held.request, held.events()) for held in self._books.held.values()]

    def attach(self, request_id: str, sink: Sink) -> None:
        """Gives what a request gets from now on to `sink`.

        Raises:
            KeyError: there is no such request, or it has ended.
        """
        with self._writing:
            self._books.held[request_id].sink = sink

    # -- a look inside

    @property
    def state(self) -> EngineState:
        """The state after all that was started. The next burst takes its buffers: copy what is to be kept, or look at
        it within `paused`."""
        with self.paused() as state:
            return state

    @property
    def trace(self) -> Trace | None:
        """All inputs of the engine and what its steps decided, all that was started included; None where
        `config.trace` asks for none."""
        if self.device.trace is None:
            return None
        with self.paused():
            return self.device.trace

    def label(self, uid: int) -> str | None:
        """The id of the request that the state knows as `uid`, and the number of the continuation if there are several;
        None if it has ended."""
        return self._books.label(uid)

    @property
    def params(self) -> Any:
        """The weights. Raises RuntimeError where there is no whole model, see `update_params`."""
        self._check_weights()
        return self.device.params

    @property
    def decoder(self) -> Decoder:
        return self.device.decoder

    def stats(self) -> EngineStats:
        """Totals as far as records were read, and how pages stand after the last program that was started. It can be
        called at any time, beside anything."""
        totals, waiting = self._totals, len(self._queue) + len(self._full)
        try:
            figures = jax.device_get(self.device.figures)
            self._seen = figures
        except RuntimeError:  # what it is to be computed from failed: the thread that runs it raises
            figures = self._seen
        return EngineStats(
            steps=totals["steps"],
            useful_row_steps=totals["useful"],
            wasted_row_steps=totals["wasted"],
            preemptions=totals["preemptions"],
            swaps=totals["swaps"],
            total_pages=self.num_pages,
            free_pages=int(figures.available - figures.cached),
            in_use_pages=self.num_pages - int(figures.available),
            running=int(figures.running),
            waiting=int(figures.waiting) + waiting,
            num_programs=self.num_programs,
            compile_seconds=self.compile_seconds,
            cached_pages=int(figures.cached),
            prefix_queries=totals["prefix_queries"],
            prefix_hits=totals["prefix_hits"],
        )

    def close(self) -> None:
        """Frees the pool and lets go of weights and programs, when a burst that another thread runs has ended. Twice is
        harmless; any other use afterwards is a RuntimeError."""
        with self._turns:
            self._broken = self._broken or "it was closed; make a new one"
            self._flights.clear()
            self.device.close()

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{f.name}={getattr(self.config, f.name)}"
            for f in fields(self.config)
            if f.name in ("page_size", "num_pages", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "dtype")
        )
        return f"Engine({type(self.decoder).__name__}, {shown})"
