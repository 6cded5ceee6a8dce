"""What an engine tells of itself: the tokens that came out, what each step did, and totals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, overload

import numpy as np

from jpaged.request import FinishReason


@dataclass(frozen=True)
class TokenEvent:
    """A continuation of a request got a token, or ended, or both. `token_id` is None where it ended without one, or
    was offered candidates in place of one."""

    request_id: str
    token_id: int | None
    logprob: float
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0  # of the request's prompt, found computed
    index: int = 0  # of the continuation
    candidates: tuple[Sequence[int], Sequence[float]] | None = None  # for its next token, and their log-probabilities


@dataclass(slots=True)
class Piece:
    """What one continuation of a request got in one burst: tokens, its end, candidates, or some of these."""

    request_id: str
    index: int  # of the continuation
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None
    stop_reason: int | None
    num_cached_tokens: int  # of the request's prompt, found computed
    candidates: tuple[Sequence[int], Sequence[float]] | None  # for its next token, and their log-probabilities
    at: float  # seconds of a monotonic clock, when the host read it
    lost: bool = False  # the engine's state was lost, and this request cannot be computed again


@dataclass(frozen=True)
class StepStats:
    """What one step did, measured on the device from the page tables."""

    step: int
    running: int  # requests that have a slot
    waiting: int  # requests that have none, on the device and on the host
    pages_in_use: int  # pages that some table names
    tokens_in_pages: int  # tokens whose keys and values they hold
    scheduled_tokens: int  # tokens computed for requests
    budget: int  # tokens computed in all, padding included
    admitted: int
    preempted: int
    pages_cached: int = 0  # pages that no table names and that can be found
    prefix_hits: int = 0  # tokens of prompts that were found computed
    swapped_out: int = 0  # of those preempted, requests whose pages went to the host
    swapped_in: int = 0  # requests resumed with pages from the host; not counted in `admitted`
    # tokens that a static baseline would reserve if each row of the batch got the longest request of that batch
    longest_of_batch_tokens: int = 0

    @classmethod
    def of(cls, record: Any, step: int, budget: int) -> StepStats:
        """Of one step, from its `StepRecord` of numpy arrays. `waiting` counts the queue on the device."""
        (only,) = cls.of_burst(record, step, budget)
        return only

    @classmethod
    def of_burst(cls, records: Any, first: int, budget: int, pending: int = 0) -> list[StepStats]:
        """Of each step of a burst.

        Args:
            records: a `StepRecord` of numpy arrays, stacked `[steps, ...]`, or that of one step.
            first: the number of the first step.
            budget: tokens that each step computed, padding included.
            pending: requests that wait on the host.
        """
        columns = {name: np.atleast_1d(getattr(records, source)).tolist() for name, source in _COLUMNS.items()}
        sums = {name: np.atleast_1d(getattr(records, source).sum(axis=-1)).tolist() for name, source in _SUMS.items()}
        columns |= sums | {"waiting": [count + pending for count in columns["waiting"]]}
        rows = zip(*columns.values(), strict=True)
        return [
            cls(step=step, budget=budget, **dict(zip(columns, row, strict=True)))
            for step, row in enumerate(rows, first)
        ]


#: Fields of `StepStats` by the field of a `StepRecord` that has their value, and by the one that is summed over slots.
_COLUMNS = {
    "running": "running", "waiting": "waiting", "pages_in_use": "pages_in_use", "tokens_in_pages": "tokens_stored",
    "admitted": "admitted", "preempted": "preempted", "pages_cached": "pages_cached", "prefix_hits": "prefix_hits",
    "swapped_in": "restored",
}  # fmt: skip
_SUMS = {"scheduled_tokens": "scheduled", "swapped_out": "to_host"}


class History(Sequence[StepStats]):
    """The steps of an engine, in order, as a list, as arrays, or as a table of pandas."""

    def __init__(self, steps: Iterable[StepStats]):
        self._steps = tuple(steps)

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> StepStats: ...
    @overload
    def __getitem__(self, index: slice) -> History: ...
    def __getitem__(self, index: int | slice) -> StepStats | History:
        return History(self._steps[index]) if isinstance(index, slice) else self._steps[index]

    def to_arrays(self) -> dict[str, np.ndarray]:
        """An array `[steps] int64` for each field of `StepStats`, by its name."""
        names = [f.name for f in fields(StepStats)]
        return {name: np.array([getattr(step, name) for step in self._steps], np.int64) for name in names}

    def to_dataframe(self) -> Any:
        """A `pandas.DataFrame` with a row for each step.

        Raises:
            ImportError: pandas is not installed; jpaged does not need it otherwise.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_dataframe needs pandas: pip install pandas, or use to_arrays()") from error
        return pandas.DataFrame(self.to_arrays()).set_index("step")

    def __repr__(self) -> str:
        return f"History({len(self)} steps; to_arrays(), to_dataframe())"


@dataclass(frozen=True, repr=False)
class EngineStats:
    """Totals since the engine was made, and how things stand. A row-step is one token position computed once; it is
    wasted on padding, and on tokens that preemption made the engine compute again. Free, cached and in-use pages are
    all pages. Of `prefix_queries` prompt tokens, each request's counted once, `prefix_hits` were found computed."""

    steps: int
    useful_row_steps: int
    wasted_row_steps: int
    preemptions: int
    total_pages: int
    free_pages: int
    in_use_pages: int
    running: int
    waiting: int
    num_programs: int
    compile_seconds: float
    cached_pages: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    swaps: int = 0  # preemptions by which pages went to the host; by the others they are computed again

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens that did not have to be computed."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0

    def _rows(self) -> list[tuple[str, str]]:
        computed = self.useful_row_steps + self.wasted_row_steps
        share = self.wasted_row_steps / computed if computed else 0.0
        return [
            ("requests", f"{self.running:,} running, {self.waiting:,} waiting"),
            (
                "pages",
                f"{self.in_use_pages:,} of {self.total_pages:,} in use, {self.cached_pages:,} cached, "
                f"{self.free_pages:,} free",
            ),
            ("prompt tokens found", f"{self.prefix_hits:,} of {self.prefix_queries:,} ({self.prefix_hit_rate:.0%})"),
            ("steps", f"{self.steps:,}"),
            ("row-steps", f"{computed:,}, {share:.0%} of them wasted"),
            ("preemptions", f"{self.preemptions:,}, {self.swaps:,} of them by swapping"),
            ("programs", f"{self.num_programs} compiled in {self.compile_seconds:.1f} s"),
        ]

    def __repr__(self) -> str:
        width = max(len(label) for label, _ in self._rows())
        return "\n".join(f"{label:<{width}}  {value}" for label, value in self._rows())

    def _repr_html_(self) -> str:
        """For notebooks: a table, rounded."""
        cells = "".join(f"<tr><th>{label}</th><td>{value}</td></tr>" for label, value in self._rows())
        return f"<table>{cells}</table>"


@dataclass(frozen=True)
class Spread:
    """A distribution over requests, in seconds. Percentiles are values that occurred (nearest rank)."""

    p50: float
    p90: float
    p99: float
    mean: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None where there are no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p99 = (ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.9, 0.99))
        return cls(p50, p90, p99, mean=math.fsum(ordered) / len(ordered))
