"""Beam search as plainly as it can be said."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from jpaged.request import BeamSearchParams


def exhaustive(
    params: BeamSearchParams, stop_ids: Collection[int], max_tokens: int, model: Callable[[tuple[int, ...]], np.ndarray]
) -> list[tuple[float, tuple[int, ...]]]:
    """Every continuation of every beam, in every round to the last; the best `beam_width` of all that ended, with their
    scores. `model` gives the log-probabilities `[vocab]` of what comes after the tokens that were generated."""
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended, width = [], params.beam_width
    for _ in range(max_tokens):
        every = []
        for tokens, total in beams:
            every += [((*tokens, token), total + logprob) for token, logprob in enumerate(model(tokens))]
        best = sorted(every, key=lambda one: -one[1])[: width * (1 + len(stop_ids))]
        ended += [one for one in best if one[0][-1] in stop_ids]
        beams = [one for one in best if one[0][-1] not in stop_ids][:width]
    scored = [(total / len(tokens) ** params.length_penalty, tokens) for tokens, total in ended + beams]
    return sorted(scored, reverse=True)[:width]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
