"""The host's side of the engine: requests in, bursts run, tokens out.

The engine is `EngineState`, a value on the device; `DeviceSide` holds the current one and gives it to one compiled
program after the other. This class keeps the books of what each request asked for and got. It decides nothing about
scheduling. The one choice it makes is which compiled program to run: one whose token budget holds the tokens of the
next step with little padding. Any choice gives the same tokens.

It runs ahead: the next burst is started before the records of the last are read, so that Python runs beside the device.

    device   | burst 1 ........ | burst 2 ........ | burst 3 ........ |
    host     start 1   start 2, read 1   start 3, read 2   start 4, ...

Any thread may call any method. Two locks: `_turns` is held by the thread that uses the device, for at most a burst;
`_writing` by a thread that changes the books, for less than a millisecond. `submit` and `stats` wait for no burst.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm.std import tqdm

from jpaged.config import EngineConfig
from jpaged.models.spec import ModelConfig
from jpaged.pool import Decoder
from jpaged.record import saving
from jpaged.record.inputs import Abort, Fork, ReplaceParams, ResetPrefixCache, Submit
from jpaged.record.stats import EngineStats, Piece, StepStats, TokenEvent
from jpaged.record.trace import Trace, TracedRequest
from jpaged.request import FinishReason, Request
from jpaged.runtime import persist
from jpaged.runtime.books import Books, Row, Sink
from jpaged.runtime.device import SUBMIT_BATCH, DeviceSide, Flight, temporary_bytes
from jpaged.runtime.prepare import Namespaces, check_request, fill_row
from jpaged.runtime.queue import HostQueue
from jpaged.runtime.reading import TOTALS, Reading, figures_of_steps, read
from jpaged.runtime.resolve import resolve
from jpaged.runtime.turns import Turns
from jpaged.step import NO_REQUEST, EngineState, Status, Submission

#: Steps whose figures `Engine.history` keeps.
_HISTORY = 100_000
#: Cache salts that are known at a time, or as many as there are pages.
_NAMESPACES = 1024


class Engine:
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

    def __init__(self, decoder: Decoder, params: Any, model_config: ModelConfig, config: EngineConfig):
        self._process, self._broken = os.getpid(), ""
        self.model_config = model_config
        self.config = resolve(config, model_config, params, temporary_bytes(decoder, params, model_config))
        assert self.config.num_pages is not None and self.config.max_model_len is not None
        self.num_pages, self.max_model_len = self.config.num_pages, self.config.max_model_len
        self._turns, self._writing = Turns(), threading.RLock()
        self.device = DeviceSide(decoder, params, model_config, self.config)
        self._books, self._queue = Books(), HostQueue(self.config.admission)
        self._full: list[Row] = []  # prompts that leave no room for a token
        self._worst: list[tuple[float, int]] = []  # ranks of rows in `Books.fresh`, negated: the last is first
        self._flights: deque[Flight] = deque()
        self._demand, self._fed = 0, 0  # after the last burst that was read; prompt tokens put since the last start
        self._delivering: Reading | None = None
        self._events: list[TokenEvent] = []  # that the next `burst` returns
        self._abandoned: deque[str] = deque()
        self._seeds = np.random.default_rng(config.seed)
        self._namespaces = Namespaces()
        self._next_uid = 0
        self.weight_version = 0
        self._weights_lost: str | None = None  # why there is no whole model
        #: What each step did, as far as records were read.
        self.history: deque[StepStats] = deque(maxlen=_HISTORY)
        self._totals = dict.fromkeys(TOTALS, 0)
        self._seen = self.device.nothing()  # the last figures that were read

    # -- doors

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this engine was made in process {self._process} and is used in {os.getpid()}, a fork of it: the "
                "threads of JAX do not live on in a fork. Make the engine in the process that uses it, and start "
                "processes with multiprocessing.get_context('spawn')"
            )
        if self._broken:
            raise RuntimeError(f"this engine cannot be used any more: {self._broken}")

    @contextmanager
    def paused(self) -> Iterator[EngineState]:
        """Holds the engine still: all that was started has been read, and no other thread starts a burst meanwhile.
        Gives the state."""
        self._check_usable()
        with self._turns:
            self._check_usable()
            try:
                self._drop_abandoned()
                while self._flights:
                    self._read()
            except BaseException as error:
                self._recover(error)
                raise
            yield self.device.state

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

    def _open(
        self, request: Request, uids: Sequence[int], sink: Sink | None = None, indices: Sequence[int] | None = None
    ) -> list[Row]:
        rows = self._books.open(request, uids, sink, indices)
        if self.device.trace is not None:
            after = self._totals["steps"] + sum(flight.steps for flight in self._flights)
            for row in rows:
                name = str(self._books.label(row.uid))
                self.device.trace.requests[row.uid] = TracedRequest(name, len(request.prompt_token_ids), after)
        return rows

    def _wait(self, row: Row) -> None:
        """Puts a row into the host's queue."""
        params, prompt = row.request.params, len(row.request.prompt_token_ids)
        longest = self.max_model_len if params.max_tokens is None else prompt + params.max_tokens
        self._queue.add(
            row.uid, priority=row.request.priority, num_prompt_tokens=prompt, max_len=min(longest, self.max_model_len),
            num_tokens=prompt + len(row.generated),
        )  # fmt: skip

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

    # -- bursts

    @property
    def has_work(self) -> bool:
        """Whether some request has not ended, or has events that `burst` did not return yet."""
        return bool(self._books.rows or self._events)

    def burst(self, *, ahead: bool = False) -> list[TokenEvent]:
        """Runs one burst and returns what came out, step by step, of requests without a sink. Without work it returns
        at once.

        If the device fails, or the call is interrupted, the exception passes on. Requests stay: the next burst goes on
        with them. Where the state is lost, they are computed again from the tokens that were read, and get the same
        tokens. Only beams, and a request whose piece was being given out, are lost then. Notes on the exception name
        them.

        Args:
            ahead: start the next burst before the records of this one are read. The state is then a burst further than
                what was returned. Beams, which wait for the host, keep the engine from running ahead.
        """
        self._check_usable()
        with self._turns:
            self._guarded(ahead)
            with self._writing:
                events, self._events = self._events, []
            return events

    def drive(self, arrived: Sized) -> None:
        """Runs a burst, ahead, unless something is in `arrived` when this thread's turn comes: another thread's burst
        may have put it there. For those who submit with sinks."""
        self._check_usable()
        with self._turns:
            if not arrived:
                self._guarded(ahead=True)

    def _guarded(self, ahead: bool) -> None:
        self._check_usable()
        try:
            self._burst(ahead)
        except BaseException as error:
            self._recover(error)
            raise

    def _burst(self, ahead: bool) -> None:
        self._drop_abandoned()
        self._end_full()
        if not self._flights and not self._events and self._books.rows:
            self._start(only_if_wanted=False)
        if ahead and self._flights and self._can_run_ahead():
            self._start(only_if_wanted=True)
        if self._flights:
            self._read()

    def _can_run_ahead(self) -> bool:
        """Whether a burst can be started before the last is read: no beam waits for the host, and not every request on
        the device is sure to end in what was started."""
        if self._books.most_candidates:
            return False
        if len(self._queue):
            return True
        steps = sum(flight.steps for flight in self._flights)
        return any(
            row.request.params.max_tokens is None or row.request.params.max_tokens - len(row.generated) > steps
            for row in self._books.on_device.values()
        )

    def _start(self, *, only_if_wanted: bool) -> None:
        with self._writing:
            self._feed()
        candidates = self._books.most_candidates
        if only_if_wanted:
            if (wanted := self._wanted()) == 0:  # what was started ends every request that has a row
                return
            if (self._budget(wanted, candidates), candidates) not in self.device.bursts:
                return  # compiling takes long: what is computed already is given out first
        self.device.exchange()
        flight = self.device.launch(self._budget(self._wanted(), candidates), candidates)
        flight.fed, self._fed = self._fed, 0
        self._flights.append(flight)

    def _wanted(self) -> int:
        """Tokens that the next step would compute if no budget limited it. Beside a burst that runs it is foreseen,
        with `async_scheduling`: what the burst leaves of what was wanted, a token a request, and prompts put since.
        Else the device says, when the burst ends."""
        if not self._flights or not self.config.async_scheduling:
            return int(jax.device_get(self.device.figures.demand))
        wanted, rows = self._demand, min(self.config.max_num_seqs, len(self._books.on_device))
        for flight in self._flights:
            wanted = max(wanted + flight.fed - flight.budget * flight.steps, 0) + rows
        return wanted + self._fed

    def _budget(self, wanted: int, most: int) -> int:
        """The token budget for a step that would compute `wanted` tokens: the smallest compiled one that holds them,
        unless more than half of it would be padding; then the smallest there is, which is compiled first."""
        best = next((b for b in self.config.budgets if b >= wanted), self.config.budgets[-1])
        compiled = min((b for b, c in self.device.bursts if b >= best and c == most), default=best)
        return compiled if compiled <= 2 * wanted else best

    # -- from the host's queue to the device

    def _free_rows(self) -> int:
        return self.config.max_num_seqs + self.config.max_queue - len(self._books.on_device)

    def _feed(self) -> None:
        """Moves the first requests of the host's queue into free rows of the state, and then those that stand before a
        request that has a row and has never run: the two change places."""
        self._queue.order()
        self._fill_rows()
        if len(self._worst) > 4 * (self.config.max_num_seqs + self.config.max_queue):  # mostly of rows that have run
            self._worst = [(-row.rank[0], -uid) for uid, row in self._books.fresh.items() if row.rank is not None]
            heapq.heapify(self._worst)
        if not len(self._queue):
            return
        coming, going = [], []
        while (first := self._queue.first()) is not None and (worst := self._last_fresh()) is not None:
            if first >= worst.rank:  # type: ignore[operator]
                break
            if self._flights:  # one that began in a burst that was not read has to stay
                while self._flights:
                    self._read()
                continue
            coming.append(self._queue.pop())
            heapq.heappop(self._worst)
            going.append(worst)
        for row in going:
            assert row.rank is not None
            self._books.take_off(row)
            self._queue.put_back(row.rank)
        for rank in coming:
            self._queue.put_back(rank)
        if going:
            uids = [row.uid for row in going]
            self.device.tell(Abort(tuple(uids)))
            self.device.drop(uids)
            self._fill_rows()

    def _last_fresh(self) -> Row | None:
        """Of the rows on the device that have never run, the one that goes last."""
        while self._worst:
            number, uid = self._worst[0]
            row = self._books.fresh.get(-uid)
            if row is not None and row.rank == (-number, -uid):
                return row
            heapq.heappop(self._worst)
        return None

    def _fill_rows(self) -> None:
        while (free := self._free_rows()) > 0 and self._queue.first() is not None:
            batch = Submission.empty(SUBMIT_BATCH, self.max_model_len)
            for place in range(min(SUBMIT_BATCH, free)):
                if self._queue.first() is None:
                    break
                rank = self._queue.pop()
                row = self._books.rows[rank[1]]
                parent = self._books.parent_of(row)
                row.rank = rank
                self._books.put_on(row)
                heapq.heappush(self._worst, (-rank[0], -rank[1]))
                if row.seed is None:
                    row.seed = int(self._seeds.integers(2**32))
                fill_row(
                    batch, place, row.uid, row.request, self.model_config, max_model_len=self.max_model_len,
                    seed=row.seed, generated=row.generated,
                    namespace=self._namespaces.number(
                        row.request.cache_salt, self.weight_version, most=max(_NAMESPACES, self.num_pages)
                    ),
                    parent=NO_REQUEST if parent is None else parent.uid,
                )  # fmt: skip
            self.device.put(batch)
            self.device.tell(Submit.of(batch))
            self._fed += int(batch.num_tokens.sum())

    def _end_full(self) -> None:
        """A prompt of exactly max_model_len tokens leaves no room: it ends by length before it runs."""
        with self._writing:
            full, self._full = self._full, []
            full = [row for row in full if row.uid in self._books.rows]
            if full:
                self.device.tell(Abort(tuple(row.uid for row in full)))
            for row in full:
                self._end(row, FinishReason.LENGTH)

    def _end(self, row: Row, reason: FinishReason, *, lost: bool = False) -> None:
        """Ends a row otherwise than by a record. A request without a sink gets an event where it ended by itself."""
        row.progress.finish_reason = reason
        held = self._books.held[row.request.request_id]
        piece = Piece(
            row.request.request_id, row.request.index, [], [], reason, None, 0, None, time.monotonic(), lost
        )  # fmt: skip
        if held.sink is not None:
            held.sink.append(piece)
        elif reason is FinishReason.LENGTH:
            self._events += [event for _, event in Reading(row, piece, [0]).events()]
        self._books.close(row)

    # -- from records to events

    def _read(self) -> None:
        """Reads the oldest burst that was started. If it is interrupted, the next call goes on where it was."""
        flight = self._flights[0]
        if flight.unread is None:
            records, demand = jax.device_get((flight.records, flight.demand))
            if self.device.trace is not None:
                self.device.trace.end_burst(records)
                flight.told = None
            with self._writing:
                steps, totals = figures_of_steps(records, flight.budget, self._totals["steps"], len(self._queue))
                self.history.extend(steps)
                self._totals = {name: value + totals[name] for name, value in self._totals.items()}
                self._demand = int(demand)
                for uid in self._books.fresh.keys() & set(np.unique(records.uid).tolist()):
                    del self._books.fresh[uid]
                flight.unread = deque(read(records, self._books.rows, time.monotonic()))
        with self._writing:
            while flight.unread:
                self._delivering = flight.unread[0]
                self._deliver(self._delivering, flight)
                flight.unread.popleft()
            self._delivering = None
            self._events += [event for _, event in sorted(flight.events, key=lambda one: one[0])]
            self._flights.popleft()

    def _deliver(self, reading: Reading, flight: Flight) -> None:
        row, piece = reading.row, reading.piece
        if row.uid not in self._books.rows:  # given up meanwhile
            return
        progress, held = row.progress, self._books.held[piece.request_id]
        progress.token_ids += piece.token_ids
        progress.logprobs += piece.logprobs
        progress.num_cached_tokens = piece.num_cached_tokens
        if piece.finish_reason is not None:
            progress.finish_reason, progress.stop_reason = piece.finish_reason, piece.stop_reason
            self._books.close(row)
        if held.sink is not None:
            held.sink.append(piece)
        else:
            flight.events += reading.events()

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

    def _drop_abandoned(self) -> None:
        names = []
        while self._abandoned:
            names.append(self._abandoned.popleft())
        if names:
            self._abort(names, None)

    def _abort(self, names: Sequence[str], index: int | None) -> None:
        with self._writing:
            rows = [row for name in dict.fromkeys(names) for row in self._books.rows_of(name, index)]
            self._queue.order()
            on_device = [row.uid for row in rows if row.on_device]
            for row in rows:
                self._queue.discard(row.uid)
                self._end(row, FinishReason.ABORT)
            if rows:
                self.device.tell(Abort(tuple(sorted(row.uid for row in rows))))
        if on_device:
            self.device.drop(on_device)

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

    # -- after a failure

    def _recover(self, error: BaseException) -> None:
        """Makes the engine usable after a call that failed or was interrupted; notes on `error` what became of it."""
        try:
            note = self._mend()
        except BaseException as second:
            self._broken = f"after {error!r} it could not start again: {second!r}"
            note = self._broken
        error.add_note(f"jpaged: {note}")

    def _mend(self) -> str:
        lost: list[str] = []
        with self._writing:
            if self._delivering is not None:  # a part of it may have been given out
                lost.append(self._delivering.piece.request_id)
                self._delivering = None
                self._flights[0].unread.popleft()  # type: ignore[union-attr]
        intact = self.device.trace is None and self.device.intact
        while self._flights and (intact or self._flights[0].unread is not None):
            try:
                self._read()
            except RuntimeError:
                intact = False
                if self._flights and self._flights[0].unread is not None:
                    raise
        with self._writing:
            if intact:
                requests = self.device.state.requests
                status, uids = np.asarray(requests.status), np.asarray(requests.uid)
                live = set(uids[(status == Status.WAITING) | (status == Status.RUNNING)].tolist())
                if strangers := sorted(live - self._books.on_device.keys()):
                    self.device.drop(strangers)
            else:
                self.device.start_again(list(self._flights))
                self._flights.clear()
                live = set()
            self._demand = self._fed = 0
            self._queue.order()
            again = [row for row in self._books if row.uid not in live and not self._queue.has(row.uid)]
            again = [row for row in again if row not in self._full]
            for row in again:
                fresh = row.uid in self._books.fresh or not row.on_device
                if row.request.candidates and not fresh:
                    lost.append(row.request.request_id)
                self._books.take_off(row)
                self._wait(row)
            for name in dict.fromkeys(lost):
                for row in self._books.rows_of(name):
                    self._end(row, FinishReason.ERROR, lost=True)
        names = list(dict.fromkeys(lost))
        became = "is whole" if intact else f"was lost, and {len(again)} requests are computed again from what was read"
        return f"the engine's state {became}; requests that were lost: {names or 'none'}"

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

    def _check_weights(self) -> None:
        """Raises RuntimeError if there is no whole model."""
        if self._weights_lost is not None:
            raise RuntimeError(
                "this engine has no usable weights, because replacing them failed midway "
                f"({self._weights_lost}): replace them again, from a checkpoint that can be read"
            )

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
        """What the engine was told and what its steps decided, all that was started included; None where
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
