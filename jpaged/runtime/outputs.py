"""What came out of requests so far: events of the engine become texts and outputs, and rounds of a beam search."""

from __future__ import annotations

import time
from dataclasses import dataclass

from jpaged.record.stats import TokenEvent
from jpaged.request import (
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
)
from jpaged.runtime.beam_search import Beam, BeamSearch, Candidates
from jpaged.runtime.engine import Engine
from jpaged.runtime.prepare import stop_ids
from jpaged.text.detokenize import IncrementalDetokenizer
from jpaged.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class StreamEvent:
    """A piece of one continuation of a prompt: what came since its last event."""

    index: int  # of the prompt in the call
    delta_text: str
    delta_token_ids: tuple[int, ...]
    finished: bool  # whether this continuation has ended; `output.finished`: all of the prompt's
    output: RequestOutput  # all of it so far
    continuation: int = 0  # its index in `output.outputs`


class Output:
    """One request's output as it grows."""

    def __init__(self, number: int, request: Request, tokenizer: Tokenizer):
        self.number = number
        self.request = request
        self.events: list[TokenEvent] = []
        self._continuations = [_Continuation(index, request, tokenizer) for index in range(request.params.n)]
        self._metrics = RequestMetrics(arrival_s=time.monotonic())
        self._cached_tokens = 0

    @property
    def finished(self) -> bool:
        return all(continuation.completion.finished() for continuation in self._continuations)

    def add(self, events: list[TokenEvent]) -> list[StreamEvent]:
        """What is new, a piece of each continuation that got something."""
        self.events.extend(events)
        of_each: dict[int, list[TokenEvent]] = {}
        for event in events:
            of_each.setdefault(event.index, []).append(event)
            if event.index == 0:  # the others begin with its pages
                self._cached_tokens = event.num_cached_tokens
            if event.token_id is not None and self._metrics.first_token_s is None:
                self._metrics.first_token_s = time.monotonic()
        return [self._piece(index, own) for index, own in of_each.items()]

    def _piece(self, index: int, events: list[TokenEvent]) -> StreamEvent:
        delta, ids = self._continuations[index].add(events)
        outputs = [continuation.completion for continuation in self._continuations]
        if self.finished:
            self._metrics.finished_s = time.monotonic()
        output = RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            outputs=outputs,
            finished=self.finished,
            metrics=self._metrics,
            num_cached_tokens=self._cached_tokens,
        )
        return StreamEvent(self.number, delta, ids, outputs[index].finished(), output, index)


class _Continuation:
    """One continuation as it grows."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer):
        self.completion = CompletionOutput(index, "", [], 0.0, [])
        self._tokenizer = tokenizer
        self._text = IncrementalDetokenizer(tokenizer, request.prompt_token_ids)

    def add(self, events: list[TokenEvent]) -> tuple[str, tuple[int, ...]]:
        """The text and the ids that are new."""
        completion, delta, ids = self.completion, "", []
        for event in events:
            completion.finish_reason, completion.stop_reason = event.finish_reason, event.stop_reason
            if event.token_id is None:
                continue
            ids.append(event.token_id)
            # The token that stopped it is one of token_ids, not of the text.
            if event.finish_reason != FinishReason.STOP:
                delta += self._text.push([event.token_id])
            decoded = self._tokenizer.decode([event.token_id], skip_special_tokens=False)
            completion.logprobs.append({event.token_id: Logprob(event.logprob, decoded)})
            completion.cumulative_logprob += event.logprob
        if completion.finished():
            delta += self._text.finish()
        completion.text += delta
        completion.token_ids.extend(ids)
        return delta, tuple(ids)


class Beams:
    """One request's beam search, and how its rounds go on in the engine."""

    def __init__(self, params: BeamSearchParams, request: Request, tokenizer: Tokenizer, engine: Engine):
        self._request, self._tokenizer, self._engine = request, tokenizer, engine
        ends = stop_ids(request.params, engine.model_config)
        room = engine.max_model_len - len(request.prompt_token_ids)
        self._search = BeamSearch(params, ends, min(params.max_tokens, room))
        self._awaited = params.beam_width  # all of them come in before the first round
        self._offers: dict[int, Candidates] = {}

    @property
    def finished(self) -> bool:
        return self._search.finished

    def add(self, events: list[TokenEvent]) -> list[BeamSearchOutput]:
        search = self._search
        for event in events:
            if event.candidates is not None:  # again, if it was preempted: the same
                self._offers[event.index] = Candidates(*event.candidates)
            elif event.finish_reason is not None and not self.finished:
                search.end(event.finish_reason)
        if not self.finished and len(self._offers) == self._awaited:
            moves = search.advance([self._offers[index] for index in range(len(search.beams))])
            self._awaited, self._offers = len(moves), {}
            if moves:
                self._engine.advance(self._request.request_id, moves)
        if not self.finished:
            return []
        self._engine.abort([self._request.request_id])
        request, penalty = self._request, search.params.length_penalty
        sequences = [self._sequence(beam, beam.score(penalty)) for beam in search.best()]
        return [BeamSearchOutput(request.request_id, request.prompt, list(request.prompt_token_ids), sequences)]

    def _sequence(self, beam: Beam, score: float) -> BeamSearchSequence:
        text = IncrementalDetokenizer(self._tokenizer, self._request.prompt_token_ids)
        stopped = beam.finish_reason == FinishReason.STOP
        # The token that stopped it is one of its tokens, not of the text.
        words = text.push(list(beam.token_ids[: len(beam.token_ids) - stopped])) + text.finish()
        last = beam.token_ids[-1] if beam.token_ids else None
        return BeamSearchSequence(
            tokens=[*self._request.prompt_token_ids, *beam.token_ids],
            text=words,
            logprobs=list(beam.logprobs),
            cum_logprob=beam.cum_logprob,
            score=score,
            finish_reason=beam.finish_reason,
            stop_reason=last if stopped and last in self._request.params.stop_token_ids else None,
        )
