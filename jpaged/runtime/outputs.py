"""What came out of requests so far, as texts: pieces of the engine become outputs, and rounds of a beam search."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from jpaged.record.stats import Piece, TokenEvent
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
from jpaged.runtime.books import Progress
from jpaged.runtime.engine import Engine
from jpaged.runtime.prepare import stop_ids
from jpaged.text.detokenize import IncrementalDetokenizer
from jpaged.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class StreamEvent:
    """A piece of one continuation of a prompt: what came since its last event. It never changes afterwards."""

    index: int  # of the prompt in the call
    delta_text: str
    delta_token_ids: tuple[int, ...]
    finished: bool  # whether this continuation has ended; `all_finished`: all of the prompt's
    continuation: int  # its index in `output.outputs`
    all_finished: bool
    request_id: str
    _moment: Moment

    @cached_property
    def output(self) -> RequestOutput:
        """All of the prompt's output up to this piece. Made when it is asked for."""
        return self._moment.output()


@dataclass(frozen=True)
class Moment:
    """How far an output had come. What it grows in is only ever added to, so this is a few numbers."""

    of: Output
    sizes: tuple[tuple[int, int, float, FinishReason | None, int | None], ...]  # see `_Continuation.size`
    metrics: RequestMetrics
    num_cached_tokens: int

    def output(self) -> RequestOutput:
        request, sizes = self.of.request, self.sizes
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[one.completion(*size) for one, size in zip(self.of.continuations, sizes, strict=True)],
            finished=all(reason is not None for *_, reason, _ in sizes),
            metrics=replace(self.metrics),
            num_cached_tokens=self.num_cached_tokens,
        )


class Output:
    """One request's output as it grows. Of `engine` it asks how long that has compiled; it does not keep it alive."""

    def __init__(self, number: int, request: Request, tokenizer: Tokenizer, engine: Engine | None = None):
        self.number = number
        self.request = request
        self.continuations = [_Continuation(index, request, tokenizer) for index in range(request.params.n)]
        self._engine = None if engine is None else weakref.ref(engine)
        self._compiled_before = 0.0 if engine is None else engine.compile_seconds
        self._metrics = RequestMetrics(arrival_s=time.monotonic())
        self._cached_tokens = 0
        self._left = len(self.continuations)  # that have not ended

    @property
    def finished(self) -> bool:
        return self._left == 0

    def add(self, piece: Piece) -> StreamEvent:
        """Takes up what came out, and says what is new."""
        one, metrics = self.continuations[piece.index], self._metrics
        if piece.index == 0 and piece.finish_reason is not FinishReason.ABORT:  # the others begin with its pages
            self._cached_tokens = piece.num_cached_tokens
        if piece.token_ids and metrics.first_token_s is None:
            metrics = replace(metrics, first_token_s=piece.at)
        delta = one.add(piece)
        if piece.finish_reason is not None:
            self._left -= 1
            if self.finished:
                metrics = replace(metrics, finished_s=piece.at)
        engine = None if self._engine is None else self._engine()
        if engine is not None and (compiled := engine.compile_seconds - self._compiled_before) > metrics.compile_s:
            metrics = replace(metrics, compile_s=compiled)
        self._metrics = metrics
        sizes = tuple(continuation.size for continuation in self.continuations)
        return StreamEvent(
            self.number, delta, tuple(piece.token_ids), piece.finish_reason is not None, piece.index, self.finished,
            self.request.request_id, Moment(self, sizes, metrics, self._cached_tokens),
        )  # fmt: skip

    def take_up(self, events: Iterable[TokenEvent]) -> StreamEvent | None:
        """Takes up what an engine gave out before it was saved; the last piece, None where there was nothing."""
        progress = [Progress(index) for index in range(len(self.continuations))]
        for event in events:
            progress[event.index].add([event])
        last = None
        for one in progress:
            if one.token_ids or one.finish_reason is not None:
                last = self.add(
                    Piece(
                        self.request.request_id, one.index, one.token_ids, one.logprobs, one.finish_reason,
                        one.stop_reason, one.num_cached_tokens, None, time.monotonic(),
                    )
                )  # fmt: skip
        return last

    def events(self) -> list[TokenEvent]:
        """What `take_up` takes."""
        return [event for one in self.continuations for event in one.progress.events(self.request.request_id)]


class _Continuation:
    """One continuation as it grows."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer):
        self.progress = Progress(index)
        self._texts: list[str] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if request.params.logprobs is None else []
        self._sum = 0.0
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids)
        # What log-probabilities show of each token: what it completes, so that they join to the text.
        self._shown = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, skip_special_tokens=False)

    def add(self, piece: Piece) -> str:
        """The text that is new."""
        progress, ids = self.progress, piece.token_ids
        progress.token_ids += ids
        progress.logprobs += piece.logprobs
        progress.finish_reason, progress.stop_reason = piece.finish_reason, piece.stop_reason
        progress.num_cached_tokens = piece.num_cached_tokens
        for logprob in piece.logprobs:
            self._sum += logprob
        if self._logprobs is not None:
            decoded = [self._shown.push([token]) for token in ids]
            if decoded and piece.finish_reason is not None:
                decoded[-1] += self._shown.finish()
            for token, logprob, text in zip(ids, piece.logprobs, decoded, strict=True):
                self._logprobs.append({token: Logprob(logprob, text)})
        if piece.finish_reason is None:
            delta = self._detokenizer.push(ids)
        else:  # the token that stopped it is one of token_ids, not of the text
            shown = ids[:-1] if piece.finish_reason is FinishReason.STOP else ids
            delta = self._detokenizer.push(shown) + self._detokenizer.finish()
        if delta:
            self._texts.append(delta)
        return delta

    @property
    def size(self) -> tuple[int, int, float, FinishReason | None, int | None]:
        """Tokens, pieces of text, the sum of log-probabilities, and how it ended."""
        progress = self.progress
        return len(progress.token_ids), len(self._texts), self._sum, progress.finish_reason, progress.stop_reason

    def completion(
        self, tokens: int, texts: int, total: float, finish_reason: FinishReason | None, stop_reason: int | None
    ) -> CompletionOutput:
        """The output when it was of that `size`."""
        return CompletionOutput(
            self.progress.index,
            "".join(self._texts[:texts]),
            self.progress.token_ids[:tokens],
            total,
            None if self._logprobs is None else self._logprobs[:tokens],
            finish_reason,
            stop_reason,
        )


class Beams:
    """One request's beam search, and how its rounds go on in the engine."""

    def __init__(self, params: BeamSearchParams, request: Request, tokenizer: Tokenizer, engine: Engine):
        self._request, self._tokenizer, self._engine = request, tokenizer, engine
        ends = stop_ids(request.params, engine.model_config)
        room = engine.max_model_len - len(request.prompt_token_ids)
        self._search = BeamSearch(params, ends, min(params.max_tokens, room))
        self._awaited = params.beam_width  # all of them are admitted before the first round
        self._offers: dict[int, Candidates] = {}

    @property
    def finished(self) -> bool:
        return self._search.finished

    def add(self, piece: Piece) -> BeamSearchOutput | None:
        """Takes up what came out; the output when the search ends with it."""
        search = self._search
        if self.finished:  # a beam that was given up with the others
            return None
        if piece.candidates is not None:  # again, if it was preempted: the same
            self._offers[piece.index] = Candidates(*piece.candidates)
        elif piece.finish_reason is not None:
            search.end(piece.finish_reason)
        if not self.finished and len(self._offers) == self._awaited:
            moves = search.advance([self._offers[index] for index in range(len(search.beams))])
            self._awaited, self._offers = len(moves), {}
            if moves:
                self._engine.advance(self._request.request_id, moves)
        if not self.finished:
            return None
        self._engine.abort(self._request.request_id)
        request, penalty = self._request, search.params.length_penalty
        sequences = [self._sequence(beam, beam.score(penalty)) for beam in search.best()]
        return BeamSearchOutput(request.request_id, request.prompt, list(request.prompt_token_ids), sequences)

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
