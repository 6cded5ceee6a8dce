"""A story that an engine is told, the same in every process: for traces and their replays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jpaged.config import EngineConfig
from jpaged.request import Request, SamplingParams
from jpaged.runtime.engine import Engine
from support.shapes import STUB_MODEL
from support.stubs import HistoryDecoder

VOCAB = 32
READER = HistoryDecoder(VOCAB)
MODEL = replace(STUB_MODEL, vocab_size=VOCAB, eos_token_ids=(31,))
#: Pages for hardly more than one of the longest, room for some more on the host, and bursts of one step and of several.
TIGHT = EngineConfig(
    page_size=4, num_pages=10, max_num_seqs=4, max_num_batched_tokens=16, token_budgets=(4, 16), max_queue=3,
    max_model_len=32, steps_per_burst=3, dtype="float32", trace=True, preemption="swap", swap_space_bytes=1024,
)  # fmt: skip


def requests(count: int = 14) -> list[Request]:
    """Prompts in pairs that begin alike, half of them sampled with seeds that the engine draws."""
    rng = np.random.default_rng(0)
    stems = rng.integers(0, 30, (count, 9)).tolist()
    return [
        Request(
            f"r{number}",
            (*stems[number // 2], *rng.integers(0, 30, rng.integers(0, 8)).tolist()),
            SamplingParams(temperature=float(number % 2), max_tokens=int(rng.integers(1, 20))),
        )
        for number in range(count)
    ]


def told(**changes) -> tuple[Engine, dict[str, list[int]]]:
    """An engine that was told the story, and the tokens that each request got: requests in two batches; one that has
    no room for a token; three given up, of which some run and one waits on the host; the prefix cache reset; and two of
    one prompt of full pages, the second of which computes a page in one step and gives it back in the same; six
    continuations in four slots, one of them branched."""
    engine = Engine(READER, (), MODEL, replace(TIGHT, **changes))
    tokens: dict[str, list[int]] = {}
    first, second = requests()[:10], requests()[10:]
    second += [Request(name, (5,) * 8, SamplingParams(temperature=0, max_tokens=5)) for name in ("twin", "other")]
    second += [Request("six", (7,) * 6, SamplingParams(temperature=1.0, n=6, max_tokens=9, ignore_eos=True))]
    for request in first:
        engine.submit(request)
    bursts = 0
    while engine.has_work or second:
        for event in engine.burst():
            if event.token_id is not None:
                name = f"six.{event.index}" if event.request_id == "six" else event.request_id
                tokens.setdefault(name, []).append(event.token_id)
        bursts += 1
        if 0 < len(tokens.get("six.5", ())) < 9 and "branch" not in tokens:
            engine.fork("six", "branch", index=5)
            tokens["branch"] = []
        if bursts == 5:
            engine.submit(Request("full", (1,) * 32, SamplingParams()))
            engine.abort([next(iter(tokens)), "r1", "r9"])
        if second and not engine.has_work:
            engine.reset_prefix_cache()
            for request in second:
                engine.submit(request)
            second = []
        assert bursts < 500, "the engine makes no progress"
    return engine, tokens
