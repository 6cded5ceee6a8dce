"""SamplingParams refuses what cannot be meant, by name, on entry."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jpaged.request import CompletionOutput, FinishReason, RequestOutput, SamplingParams


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -0.1}, "temperature must be finite, at least 0; got -0.1"),  # SA-01
        ({"temperature": math.nan}, "temperature .*got nan"),
        ({"temperature": math.inf}, "temperature .*got inf"),
        ({"temperature": "hot"}, "temperature .*got 'hot'"),
        ({"temperature": None}, "temperature .*got None"),
        ({"temperature": True}, "temperature .*got True"),
        ({"top_k": -2}, "top_k must be -1 or 0 .*got -2"),  # SA-03
        ({"top_k": 1.5}, "top_k .*got 1.5"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]; got 0.0"),
        ({"top_p": 1.0001}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\]; got -0.1"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, or None; got 0"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens \(9\) must not exceed max_tokens \(8\)"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*32\), or None; got -1"),
        ({"seed": 2**32}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"stop_token_ids": [-1]}, "stop_token_ids .*got -1"),  # SA-08
        ({"stop_token_ids": [1.5]}, "stop_token_ids .*got 1.5"),
        ({"stop_token_ids": ["</s>"]}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
    ],
)
def test_impossible_values_are_named(fields, words):
    """SA-01, SA-03, SA-08: unchecked input reaches the step and takes everyone's request down with it."""
    with pytest.raises(ValueError, match=words):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0}, {"temperature": 1e-6}, {"temperature": np.float32(0.5)}, {"top_k": -1}, {"top_k": 0},
        {"top_k": 1_000_000}, {"top_k": np.int64(5)}, {"top_p": 1}, {"top_p": 1e-4}, {"min_p": 0}, {"min_p": 1},
        {"seed": 0}, {"seed": 2**32 - 1}, {"max_tokens": None}, {"max_tokens": 1_000_000_000},
        {"min_tokens": 4, "max_tokens": None}, {"stop_token_ids": None}, {"stop_token_ids": [1, 2]},
    ],
)  # fmt: skip
def test_odd_but_meaningful_values_are_taken(fields):
    SamplingParams(**fields)


def test_stop_ids_become_a_tuple():
    """Catches: a list that the caller changes afterwards."""
    ids = [3, 4]
    params = SamplingParams(stop_token_ids=ids)
    ids.append(5)
    assert params.stop_token_ids == (3, 4) and SamplingParams(stop_token_ids=None).stop_token_ids == ()


def test_outputs_print_briefly():
    """A notebook shows the repr: it must not be pages long."""
    output = CompletionOutput(0, "x" * 500, [1] * 500, -1.0, [], FinishReason.LENGTH)
    shown = repr(RequestOutput("a", None, [1, 2], [output], finished=True))
    assert len(shown) < 200 and "output_tokens=500" in shown and "'length'" in shown
    assert output.finished() and not CompletionOutput(0, "", [], 0.0, []).finished()


def test_reasons_are_their_words():
    assert [str(r) for r in FinishReason] == ["stop", "length", "abort", "error"]
