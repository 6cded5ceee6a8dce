"""From the records of a burst to what each request got: a few operations on whole arrays, then a piece a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jpaged.record.stats import Piece, StepStats, TokenEvent
from jpaged.request import FinishReason
from jpaged.runtime.books import Row
from jpaged.step import Finish

FINISH_REASONS = {
    Finish.STOP: FinishReason.STOP,
    Finish.LENGTH: FinishReason.LENGTH,
    Finish.ERROR: FinishReason.ERROR,
}
_REASONS = [FINISH_REASONS.get(finish) for finish in Finish]  # by number


@dataclass
class Reading:
    """What one row got in a burst, and where in the records each token of it stands."""

    row: Row
    piece: Piece
    places: list[int]

    def events(self) -> list[tuple[int, TokenEvent]]:
        """An event for each place in the records."""
        piece, last = self.piece, len(self.places) - 1
        return [
            (
                place,
                TokenEvent(
                    piece.request_id,
                    piece.token_ids[number] if number < len(piece.token_ids) else None,
                    piece.logprobs[number] if number < len(piece.token_ids) else 0.0,
                    piece.finish_reason if number == last else None,
                    piece.stop_reason if number == last else None,
                    piece.num_cached_tokens,
                    piece.index,
                    piece.candidates if number == last else None,
                ),
            )
            for number, place in enumerate(self.places)
        ]


def read(records: Any, rows: Mapping[int, Row], now: float) -> list[Reading]:
    """What requests got in a burst, in the order of their uids.

    Args:
        records: a `StepRecord` of numpy arrays, stacked `[steps, ...]`.
        rows: those that have not ended, by uid. What the records say of others is left out: a request may have been
            given up after the burst had begun.
        now: seconds of a monotonic clock.
    """
    some = records.sampled | records.offered | (records.finish != Finish.NOT)
    place = np.flatnonzero(some)
    uid = records.uid.ravel()[place]
    order = np.argsort(uid, kind="stable")  # by uid, and then by step: a uid has one slot in a step
    place, uid = place[order], uid[order]
    if not len(uid):
        return []
    starts = np.flatnonzero(np.diff(uid, prepend=uid[0] - 1)).tolist()
    last = np.array([*starts[1:], len(uid)]) - 1
    of_last = place[last]
    finish, cached, offered = (
        getattr(records, name).ravel()[of_last].tolist() for name in ("finish", "cached_tokens", "offered")
    )
    sampled = records.sampled.ravel()[place]
    all_sampled, sampled = bool(sampled.all()), sampled.tolist()
    token, logprob = records.token.ravel()[place].tolist(), records.logprob.ravel()[place].tolist()
    places, uids = place.tolist(), uid[starts].tolist()
    readings = []
    for number, (name, start, end) in enumerate(zip(uids, starts, [*starts[1:], len(places)], strict=True)):
        row = rows.get(name)
        if row is None:
            continue
        tokens, logprobs = token[start:end], logprob[start:end]
        if not all_sampled:
            tokens = [value for value, got in zip(tokens, sampled[start:end], strict=True) if got]
            logprobs = [value for value, got in zip(logprobs, sampled[start:end], strict=True) if got]
        request, reason = row.request, _REASONS[finish[number]]
        stop = None
        if reason is FinishReason.STOP and tokens[-1] in request.params.stop_token_ids:
            stop = tokens[-1]
        candidates = None
        if offered[number]:
            step, slot = divmod(of_last[number].item(), records.uid.shape[1])
            offers = records.candidates[step, slot], records.candidate_logprobs[step, slot]
            candidates = tuple(array[: request.candidates].tolist() for array in offers)
        piece = Piece(
            request.request_id, request.index, tokens, logprobs, reason, stop, cached[number], candidates, now
        )  # fmt: skip
        readings.append(Reading(row, piece, places[start:end]))
    return readings


#: Names in `Engine.totals`.
TOTALS = ("steps", "useful", "wasted", "preemptions", "swaps", "prefix_queries", "prefix_hits")


def figures_of_steps(records: Any, budget: int, done: int, pending: int) -> tuple[list[StepStats], dict[str, int]]:
    """The figures of each step of a burst, and what the burst adds to the totals.

    Args:
        records: as for `read`.
        budget: tokens that each step computed, padding included.
        done: steps before.
        pending: requests that wait on the host.
    """
    steps = StepStats.of_burst(records, done + 1, budget, pending)
    computed = sum(step.scheduled_tokens for step in steps)
    lost = int(records.discarded.sum()) - int(records.recovered.sum())  # by preemption: computed once in vain
    return steps, {
        "steps": len(steps),
        "useful": computed - lost,
        "wasted": budget * len(steps) - computed + lost,
        "preemptions": sum(step.preempted for step in steps),
        "swaps": sum(step.swapped_out for step in steps),
        "prefix_queries": int(records.prefix_queries.sum()),
        "prefix_hits": sum(step.prefix_hits for step in steps),
    }
