"""The loop of the engine on the host: requests from the queue to the device, bursts, and their records back.

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
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jpaged.config import EngineConfig
from jpaged.models.spec import ModelConfig
from jpaged.pool import Decoder
from jpaged.record.inputs import Abort, Submit
from jpaged.record.stats import Piece, StepStats, TokenEvent
from jpaged.record.trace import TracedRequest
from jpaged.request import FinishReason, Request
from jpaged.runtime.books import Books, Row, Sink
from jpaged.runtime.device import SUBMIT_BATCH, DeviceSide, Flight, temporary_bytes
from jpaged.runtime.prepare import Namespaces, fill_row
from jpaged.runtime.queue import HostQueue
from jpaged.runtime.reading import TOTALS, Reading, figures_of_steps, read
from jpaged.runtime.resolve import resolve
from jpaged.runtime.turns import Turns
from jpaged.step import NO_REQUEST, EngineState, Status, Submission

#: Steps whose figures `Engine.history` keeps.
_HISTORY = 100_000
#: Cache salts that are known at a time, or as many as there are pages.
_NAMESPACES = 1024


class EngineCore:
    """What `Engine` is built on: the state of the device, the books, the queue, and the loop; see `Engine.__init__`."""

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

    # -- the host's queue

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
        may have put it there. For callers that submit with sinks."""
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

    def _check_weights(self) -> None:
        """Raises RuntimeError if there is no whole model."""
        if self._weights_lost is not None:
            raise RuntimeError(
                "this engine has no usable weights, because replacing them failed midway "
                f"({self._weights_lost}): replace them again, from a checkpoint that can be read"
            )
