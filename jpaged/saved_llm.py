"""What an LLM adds to a saved engine, so that another LLM can give the outputs that were not taken yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jpaged.record.saving import Saved, to_json
from jpaged.record.stats import TokenEvent
from jpaged.request import Request
from jpaged.runtime.outputs import Output, StreamEvent
from jpaged.text.tokenizer import Tokenizer

_FILE = "llm.json"


@dataclass(frozen=True)
class Ended:
    """A request that has ended and whose output was not taken yet."""

    request: Request
    events: tuple[TokenEvent, ...]


@dataclass(frozen=True)
class SavedLLM:
    """The content of llm.json."""

    model: str
    tokenizer: str  # its fingerprint
    next_id: int
    order: tuple[str, ...]  # ids of requests whose outputs are wanted, in the order of submission
    ended: tuple[Ended, ...]

    @classmethod
    def of(cls, model: str, tokenizer: Tokenizer, next_id: int, outputs: Mapping[str, Output]) -> SavedLLM:
        """Describes an LLM. `outputs` are those not taken yet, by request id, in the order of submission."""
        path = Path(model).expanduser()
        ended = [one for one in outputs.values() if one.finished]
        return cls(
            model=str(path.absolute()) if path.exists() else model,
            tokenizer=tokenizer.fingerprint(),
            next_id=next_id,
            order=tuple(outputs),
            ended=tuple(Ended(one.request, tuple(one.events())) for one in ended),
        )

    def files(self) -> dict[str, str]:
        """The file to put into the directory of the saved engine."""
        return {_FILE: to_json(self)}

    @classmethod
    def read(cls, saved: Saved) -> SavedLLM:
        """Raises ValueError where the engine was saved without an LLM, or the file is damaged."""
        return saved.read(_FILE, cls)

    def outputs(
        self, unfinished: Iterable[tuple[Request, list[TokenEvent]]], tokenizer: Tokenizer
    ) -> Iterator[tuple[Output, StreamEvent | None]]:
        """The outputs not taken yet, in the order of submission, each with its last piece so far; None: it has none.

        Args:
            unfinished: requests that the restored engine holds, and their events so far.
            tokenizer: of the model.
        """
        held = {one.request.request_id: (one.request, list(one.events)) for one in self.ended}
        held |= {request.request_id: (request, events) for request, events in unfinished}
        # Last are the requests that were submitted to the engine itself.
        for number, name in enumerate(dict.fromkeys((*self.order, *held))):
            request, events = held[name]
            output = Output(number, request, tokenizer)
            yield output, output.take_up(events)
