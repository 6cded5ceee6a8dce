"""Beam search: which continuations go on, from the candidates that the engine offers for each beam.

In each round all candidates of all beams are put in one order, by the log-probability of all that was generated. Of
the best `(1 + e) * beam_width`, where e tokens can end a sequence, those that end with one have ended; the first
`beam_width` of the others are the beams of the next round, and so many there are. A sequence's score is its
log-probability over its number of generated tokens to the power of `length_penalty`, as in transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jpaged.request import BeamSearchParams, FinishReason, Request


@dataclass(frozen=True)
class Beam:
    """What was generated so far, and its log-probabilities."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    cum_logprob: float = 0.0
    finish_reason: FinishReason | None = None

    def score(self, length_penalty: float) -> float:
        return self.cum_logprob / max(len(self.token_ids), 1) ** length_penalty


@dataclass(frozen=True)
class Candidates:
    """Tokens that can come next, the most probable first, and their log-probabilities."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


class BeamSearch:
    """One prompt's search.

    Args:
        params: how to search.
        stop_ids: tokens that end a sequence.
        max_tokens: of a sequence, what `params` and the model allow.
    """

    def __init__(self, params: BeamSearchParams, stop_ids: Collection[int], max_tokens: int):
        self.params, self.stop_ids, self.max_tokens = params, frozenset(stop_ids), max_tokens
        self.beams = [Beam()]
        self.ended: list[Beam] = []

    @property
    def finished(self) -> bool:
        return not self.beams

    @staticmethod
    def num_candidates(beam_width: int, stop_ids: Collection[int], vocab_size: int) -> int:
        """As many as a beam can contribute to the best of a round."""
        return min((1 + len(stop_ids)) * beam_width, vocab_size)

    def advance(self, candidates: Sequence[Candidates]) -> list[tuple[int, int]]:
        """Takes the candidates of each beam. Returns where each beam of the next round comes from and its new token;
        nothing when the search has finished."""
        every = [
            (beam.cum_logprob + logprob, source, token, logprob)
            for source, (beam, offer) in enumerate(zip(self.beams, candidates, strict=True))
            for token, logprob in zip(offer.token_ids, offer.logprobs, strict=True)
        ]
        every.sort(key=lambda one: -one[0])  # stable: of equal ones the first beam's most probable first
        width = self.params.beam_width
        moves: list[tuple[int, int]] = []
        beams: list[Beam] = []
        for cum_logprob, source, token, logprob in every[: (1 + len(self.stop_ids)) * width]:
            old = self.beams[source]
            tokens, logprobs = (*old.token_ids, token), (*old.logprobs, logprob)
            if token in self.stop_ids:
                self.ended.append(Beam(tokens, logprobs, cum_logprob, FinishReason.STOP))
            elif len(beams) < width:
                moves.append((source, token))
                beams.append(Beam(tokens, logprobs, cum_logprob))
        self.beams = beams
        if beams and len(beams[0].token_ids) == self.max_tokens:
            self.end(FinishReason.LENGTH)
        elif self._cannot_improve():
            self.beams = []
        return moves if self.beams else []

    def end(self, reason: FinishReason) -> None:
        """Ends the beams that there are."""
        self.ended += [Beam(beam.token_ids, beam.logprobs, beam.cum_logprob, reason) for beam in self.beams]
        self.beams = []

    def best(self) -> list[Beam]:
        """The best sequences that have ended, the best first."""
        return sorted(self.ended, key=lambda beam: -beam.score(self.params.length_penalty))[: self.params.beam_width]

    def _cannot_improve(self) -> bool:
        """Whether no beam can come to be one of the best any more: a log-probability never grows, and is divided by at
        most the greatest power of a length that is still to come."""
        if not self.beams or len(self.ended) < self.params.beam_width:
            return False
        penalty = self.params.length_penalty
        length = self.max_tokens if penalty > 0 else len(self.beams[0].token_ids) + 1
        return self.best()[-1].score(penalty) >= max(beam.cum_logprob for beam in self.beams) / length**penalty


@dataclass(frozen=True)
class BeamRoom:
    """What an engine has for beams. Beams of one prompt wait for each other, so a prompt is admitted only if all its
    beams have slots and pages to their end."""

    slots: int
    pages: int
    page_size: int
    max_model_len: int

    def pages_of(self, number: int, request: Request) -> int:
        """Pages that the beams of prompt `number` need at most, so that none of them ever waits for another.

        Raises:
            ValueError: there are fewer pages or slots than the beams need, or no token can follow the prompt.
        """
        width, prompt = request.params.n, len(request.prompt_token_ids)
        if prompt >= self.max_model_len:
            raise ValueError(f"prompt {number} has {prompt} tokens: nothing can follow within max_model_len")
        total = -(-min(prompt + (request.params.max_tokens or 0), self.max_model_len) // self.page_size)
        # Each has its own from the end of the prompt on, and admission keeps one for each to grow into.
        pages = total + (width - 1) * (total - prompt // self.page_size) + width
        if width > self.slots or pages > self.pages:
            raise ValueError(
                f"prompt {number}: {width} beams need {width} slots and up to {pages} pages at the same time; there "
                f"are {self.slots} slots (max_num_seqs) and {self.pages} pages"
            )
        return pages

    def fits(self, beam_width: int, pages: Sequence[int]) -> bool:
        """Whether searches that need `pages` can run at the same time."""
        return len(pages) * beam_width <= self.slots and sum(pages) <= self.pages
