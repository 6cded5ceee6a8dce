"""Calls of an LLM beside each other: each waits for its own requests, and a call that waits runs the engine for all."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator

from jpaged.record.stats import Piece
from jpaged.request import BeamSearchOutput, BeamSearchParams, Request
from jpaged.runtime.beam_search import BeamRoom
from jpaged.runtime.engine import Engine
from jpaged.runtime.outputs import Beams, Output, StreamEvent
from jpaged.text.tokenizer import Tokenizer


class Call:
    """Requests whose pieces one caller waits for.

    Args:
        outputs: of the requests, which grow here.
        events: what came of them before; see `Output.take_up`.
    """

    def __init__(self, outputs: Iterable[Output], events: Iterable[StreamEvent] = ()):
        self.outputs = {output.request.request_id: output for output in outputs}  # that were not taken yet
        self.arrived: deque[Piece] = deque()
        self.events = deque(events)  # made and not taken yet
        self._making = threading.Lock()

    def make_events(self) -> None:
        """Turns pieces that have arrived into events. The caller's thread does, or one that saves the engine."""
        with self._making:
            while self.arrived:
                piece = self.arrived.popleft()
                if piece.lost:
                    raise RuntimeError(
                        f"request {piece.request_id!r} was lost when another call failed or was interrupted; submit it "
                        "again"
                    )
                self.events.append(self.outputs[piece.request_id].add(piece))


class Streams:
    """The open calls of an LLM."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer):
        self._engine, self._tokenizer = engine, tokenizer
        self._calls: dict[int, Call] = {}  # by id
        self._beam_turn = threading.Lock()

    def outputs(self) -> dict[str, Output]:
        """Those that were not taken yet, in the order of submission. The engine must be paused."""
        for call in list(self._calls.values()):
            call.make_events()
        outputs = [output for call in list(self._calls.values()) for output in call.outputs.values()]
        return {output.request.request_id: output for output in outputs}

    def open(self, requests: list[Request]) -> Call:
        """Submits requests. Either all are, or none."""
        call = Call(Output(number, request, self._tokenizer, self._engine) for number, request in enumerate(requests))
        self._calls[id(call)] = call
        done: list[str] = []
        try:
            for request in requests:
                self._engine.submit(request, call.arrived)
                done.append(request.request_id)
        except BaseException:
            self._engine.abandon(done)
            del self._calls[id(call)]
            raise
        return call

    def left(self, outputs: Iterable[tuple[Output, StreamEvent | None]]) -> Call:
        """A call for the requests that a restored engine holds; each with what it has got already. It is open until
        `events` has given out its ends."""
        pairs = list(outputs)
        call = Call((output for output, _ in pairs), (last for output, last in pairs if last and output.finished))
        for output, _ in pairs:
            if not output.finished:
                self._engine.attach(output.request.request_id, call.arrived)
        self._calls[id(call)] = call
        return call

    def events(self, call: Call) -> Iterator[StreamEvent]:
        """Runs the requests of a call to their ends. However it is left, none of them stays in the engine.

        Several may be open at once, in one thread or in many: the engine runs the requests of all of them together,
        and whichever is asked first for what has not come yet runs the next burst, for the others too.
        """
        try:
            while call.outputs:
                while not call.arrived and not call.events:
                    self._engine.drive(call.arrived)
                call.make_events()
                while call.events:
                    event = call.events.popleft()
                    if event.all_finished:
                        del call.outputs[event.request_id]
                    yield event
        finally:
            # This may be the garbage collector's call, at any place. When Python ends, nothing is left to give up.
            if not sys.is_finalizing():
                self._calls.pop(id(call), None)
                if call.outputs:
                    self._engine.abandon(list(call.outputs))

    def beam_search(
        self, requests: list[Request], params: BeamSearchParams, room: BeamRoom
    ) -> Iterator[BeamSearchOutput]:
        """Runs beam searches to their ends, in the order in which they end. One call at a time: beams that wait for
        each other's pages would wait for ever.

        Raises:
            ValueError: see `BeamRoom.pages_of`; nothing has run then.
        """
        needs = [room.pages_of(number, request) for number, request in enumerate(requests)]
        waiting = deque(zip(requests, needs, strict=True))
        arrived: deque[Piece] = deque()
        open_: dict[str, tuple[Beams, int]] = {}
        with self._beam_turn:
            try:
                while waiting or open_:
                    pages = [number for _, number in open_.values()]
                    while waiting and room.fits(params.beam_width, [*pages, waiting[0][1]]):
                        request, needed = waiting.popleft()
                        pages.append(needed)
                        open_[request.request_id] = Beams(params, request, self._tokenizer, self._engine), needed
                        self._engine.submit(request, arrived)
                    self._engine.drive(arrived)
                    while arrived:
                        piece = arrived.popleft()
                        if piece.lost:
                            raise RuntimeError(
                                f"the beam search {piece.request_id!r} was lost when another call failed or was "
                                "interrupted: its beams are known to the device alone; call it again"
                            )
                        search, _ = open_.get(piece.request_id, (None, 0))
                        if search is not None and (output := search.add(piece)) is not None:
                            del open_[piece.request_id]
                            yield output
            finally:
                if not sys.is_finalizing():
                    self._engine.abandon(list(open_))
