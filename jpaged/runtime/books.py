"""Which requests have not ended, what each has got so far, and where each is: on the host's queue or on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jpaged.record.stats import Piece, TokenEvent
from jpaged.request import FinishReason, Request
from jpaged.runtime.queue import Rank


class Sink(Protocol):
    """Takes what a request gets, for example a deque."""

    def append(self, piece: Piece, /) -> None: ...


@dataclass
class Progress:
    """What one continuation has got so far."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0

    def events(self, request_id: str) -> list[TokenEvent]:
        """The same as the engine gave it out, token by token."""
        events = [
            TokenEvent(request_id, token, logprob, None, None, self.num_cached_tokens, self.index)
            for token, logprob in zip(self.token_ids, self.logprobs, strict=True)
        ]
        if self.finish_reason is not None:
            # A token ends it, but where its logits were not finite or its prompt left no room.
            ended = self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and events
            last = events.pop() if ended else None
            token, logprob = (None, 0.0) if last is None else (last.token_id, last.logprob)
            events.append(
                TokenEvent(
                    request_id, token, logprob, self.finish_reason, self.stop_reason, self.num_cached_tokens, self.index
                )
            )
        return events

    def add(self, events: Iterable[TokenEvent]) -> None:
        """Takes up what `events` gave out."""
        for event in events:
            if event.token_id is not None:
                self.token_ids.append(event.token_id)
                self.logprobs.append(event.logprob)
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
            self.num_cached_tokens = event.num_cached_tokens


@dataclass
class Row:
    """A continuation that has not ended."""

    uid: int
    request: Request  # as that of one continuation
    progress: Progress
    before: tuple[int, ...] = ()  # of a branch, what its parent had generated
    seed: int | None = None  # drawn when it is first put on the device; None: not yet, or its own
    rank: Rank | None = None  # by which it was put on the device
    on_device: bool = False

    @property
    def generated(self) -> list[int]:
        """Tokens after the prompt, as far as they were read."""
        return [*self.before, *self.progress.token_ids]


@dataclass
class Held:
    """A request that has not ended."""

    request: Request
    sink: Sink | None  # None: `Engine.burst` returns its events
    rows: dict[int, Row]  # by index, of continuations that have not ended
    progress: list[Progress]  # of all its continuations

    def events(self) -> list[TokenEvent]:
        """What came out so far, continuation by continuation."""
        return [event for one in self.progress for event in one.events(self.request.request_id)]


class Books:
    """The requests of an engine."""

    def __init__(self):
        self.held: dict[str, Held] = {}  # by request id, in the order of submission
        self.rows: dict[int, Row] = {}  # by uid
        self.on_device: dict[int, Row] = {}
        self.fresh: dict[int, Row] = {}  # those on the device that have never had a slot, as far as records were read
        self._candidates: Counter[int] = Counter()  # how many rows on the device are offered so many

    def open(
        self, request: Request, uids: Sequence[int], sink: Sink | None = None, indices: Sequence[int] | None = None
    ) -> list[Row]:
        """Takes up a request; its continuation `indices[i]`, or number i, has the uid `uids[i]`."""
        each, numbers = request.continuations(), range(len(uids)) if indices is None else indices
        progress = [Progress(index) for index in range(len(each))]
        rows = [Row(uid, each[index], progress[index]) for uid, index in zip(uids, numbers, strict=True)]
        self.held[request.request_id] = Held(request, sink, {row.request.index: row for row in rows}, progress)
        self.rows |= {row.uid: row for row in rows}
        return rows

    def close(self, row: Row) -> None:
        """Forgets a continuation that has ended, and its request with the last."""
        self.take_off(row)
        self.rows.pop(row.uid, None)
        held = self.held[row.request.request_id]
        held.rows.pop(row.request.index, None)
        if not held.rows:
            del self.held[row.request.request_id]

    def put_on(self, row: Row) -> None:
        """Notes that the device has it."""
        row.on_device = True
        self.on_device[row.uid] = self.fresh[row.uid] = row
        if row.request.candidates:
            self._candidates[row.request.candidates] += 1

    def take_off(self, row: Row) -> None:
        """Notes that the device has it no more."""
        if row.on_device and row.request.candidates:
            self._candidates[row.request.candidates] -= 1
            self._candidates += Counter()  # without those that are 0
        row.on_device = False
        self.on_device.pop(row.uid, None)
        self.fresh.pop(row.uid, None)

    @property
    def most_candidates(self) -> int:
        """The most that any row on the device is offered."""
        return max(self._candidates, default=0)

    def rows_of(self, request_id: str, index: int | None = None) -> list[Row]:
        """The rows of a request, or of one continuation; none if it has ended."""
        held = self.held.get(request_id)
        rows = [] if held is None else list(held.rows.values())
        return rows if index is None else [row for row in rows if row.request.index == index]

    def parent_of(self, row: Row) -> Row | None:
        """A continuation of the same prompt that is on the device, for `row` to begin with its pages; None: there is
        none, or `row` has tokens of its own."""
        if row.before or row.progress.token_ids:
            return None
        return next((one for one in self.held[row.request.request_id].rows.values() if one.on_device), None)

    def label(self, uid: int) -> str | None:
        """The request's id, with the number of the continuation where there are several; None: it has ended."""
        row = self.rows.get(uid)
        if row is None:
            return None
        several = self.held[row.request.request_id].request.params.n > 1
        return f"{row.request.request_id}.{row.request.index}" if several else row.request.request_id

    def __iter__(self) -> Iterator[Row]:
        return iter(list(self.rows.values()))
