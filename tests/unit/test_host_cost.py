"""What the host does for a request does not grow with how many there are. Operations are counted; no time is taken."""

from __future__ import annotations

import gc
import sys

from jpaged.bench.host import requests_of, run, stand_in_engine
from jpaged.record.stats import Piece
from jpaged.runtime.books import Held, Progress, Row
from jpaged.runtime.outputs import Output


def calls(function) -> int:
    """Calls of functions, Python's and C's, that `function` makes."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_calls_a_request_are_as_many_among_thousands_as_among_hundreds():
    """U-06. Catches: a list that is scanned or copied for each burst, or for each request that waits."""
    engine = stand_in_engine(slots=16, queue=16)
    run(engine, requests_of(20, tokens=3))
    few, many = (calls(lambda n=n: run(engine, requests_of(n, tokens=3))) / n for n in (200, 4000))
    assert many <= 1.05 * few


def test_a_token_costs_no_more_after_a_long_prompt_or_a_long_output():
    """Catches: a prompt, or an output so far, that is walked for every piece; log-probabilities made without asking."""
    engine = stand_in_engine(slots=4)
    run(engine, requests_of(4, tokens=3))
    at_most = {}
    for prompt, tokens in ((8, 100), (900, 100), (8, 400)):
        whole = calls(lambda p=prompt, t=tokens: run(engine, requests_of(4, tokens=t, prompt=p)))
        start = calls(lambda p=prompt: run(engine, requests_of(4, tokens=1, prompt=p)))
        at_most[prompt, tokens] = (whole - start) / (tokens - 1)
    assert max(at_most.values()) <= 1.05 * min(at_most.values())


def test_of_a_request_that_has_ended_its_output_is_kept_and_nothing_else():
    """Catches: books, pieces or events of ended requests that stay in the engine, or hang on an output."""
    engine, outputs = stand_in_engine(slots=4, queue=4), []
    run(engine, requests_of(40, tokens=5), keep=outputs)
    for _ in range(300):  # given up before a burst ran
        engine.submit(requests_of(1, tokens=5)[0])
        engine.abort("0")
    assert len(engine._worst) <= 4 * (4 + 4) + 8 and len(engine._queue._heap) <= 257
    gc.collect()
    kept = [one for one in gc.get_objects() if type(one) in (Held, Row, Progress, Piece, Output)]
    assert not kept and len(outputs) == 40
    assert outputs[3].outputs[0].text.count("w") == 5 and outputs[3].outputs[0].logprobs is None


def test_a_step_of_many_rows_is_read_in_few_operations():
    """256 rows and 8 steps. Catches: work for each token where a piece for each request will do."""
    engine = stand_in_engine(slots=256, steps=8)
    run(engine, requests_of(256, tokens=8))
    short, long = (calls(lambda t=t: run(engine, requests_of(256, tokens=t))) for t in (80, 160))
    assert (long - short) / (10 * 256 * 8) < 12  # calls a token
