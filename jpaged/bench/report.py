"""What a benchmark says: one result an engine, with units in the names, and the ratios between them.

Ratios and rates of a run in which a request failed would flatter or belittle it. Such a run says so, counts
the tokens of its completed requests only, and is not compared.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jpaged.bench.measure import Measurement, StepSample
from jpaged.record.stats import Spread

#: quantities whose ratio between two engines is reported
RATIO_KEYS = (
    "output_tokens_per_s", "wall_s", "steps", "wasted_row_steps", "latency_s.p50", "latency_s.p99",
    "ttft_s.p50", "ttft_s.p99", "prompt_tokens_computed", "kv_share.reserved_tokens_peak", "kv_share.used_of_reserved",
    "peak_rss_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class KVShare:
    """How much of the KV memory holds real tokens, as means over the steps in which a request ran.

    Allocated is the whole pool; reserved are the slots of the pages that requests own; used are the slots in
    which a token's keys and values are stored. All three are read from the page tables. The peak is the most of any
    step, in pages of `page_size` tokens; static batching has a page a row, of `max_model_len` tokens.
    `longest_of_batch_tokens_mean` is what static batching would reserve if a row got only what the longest request of
    its batch may need; None for other engines. Such a baseline computes the same tokens in the same steps.
    """

    allocated_tokens: int
    page_size: int
    reserved_pages_peak: int
    reserved_tokens_mean: float
    used_tokens_mean: float
    longest_of_batch_tokens_mean: float | None = None

    @classmethod
    def of(cls, history: Sequence[StepSample], *, num_pages: int, page_size: int) -> KVShare:
        busy = [s for s in history if s.pages_in_use]
        count = max(1, len(busy))
        return cls(
            allocated_tokens=num_pages * page_size,
            page_size=page_size,
            reserved_pages_peak=max((s.pages_in_use for s in busy), default=0),
            reserved_tokens_mean=sum(s.pages_in_use for s in busy) * page_size / count,
            used_tokens_mean=sum(s.tokens_in_pages for s in busy) / count,
            longest_of_batch_tokens_mean=sum(s.longest_of_batch_tokens for s in busy) / count or None,
        )

    def to_json(self) -> dict[str, float | None]:
        used, reserved, longest = self.used_tokens_mean, self.reserved_tokens_mean, self.longest_of_batch_tokens_mean
        return {
            "used_of_longest_of_batch": None if longest is None else used / longest,
            **asdict(self),
            "reserved_tokens_peak": self.reserved_pages_peak * self.page_size,
            "used_of_reserved": used / reserved if reserved else 0.0,
            "used_of_allocated": used / self.allocated_tokens if self.allocated_tokens else 0.0,
        }


@dataclass(frozen=True)
class RunResult:
    """One engine's run of one workload. Rates count the ids of completed requests over the wall time of the
    whole run; `None` stands where no request was completed."""

    engine: str
    model: str
    requests: int
    failed_requests: int
    failures: dict[str, str]
    prompt_tokens: int  # of all requests
    prompt_tokens_computed: int  # of requests that were admitted; this and the next as in `Measurement`
    prompt_tokens_found: int
    output_tokens: int  # of the completed ones
    token_ids_sha256: str  # of those tokens, to compare with other engines: see `Measurement.token_ids_sha256`
    output_tokens_per_s: float
    wall_s: float
    compile_s: float
    compiled_programs: int
    compiled_while_measured: int
    steps: int
    useful_row_steps: int
    wasted_row_steps: int
    preemptions: int
    ttft_s: Spread | None
    latency_s: Spread | None
    kv_share: KVShare
    peak_rss_bytes: int | None  # None where other things ran in the process too
    device: str
    jax_version: str
    threads: int
    config: dict[str, Any] = field(default_factory=dict)
    breakdown: dict[str, Any] | None = None

    @classmethod
    def of(
        cls,
        measured: Measurement,
        *,
        engine: str,
        model: str,
        prompt_tokens: int,
        peak_rss_bytes: int | None,
        device: str,
        jax_version: str,
        config: dict[str, Any],
        breakdown: dict[str, Any] | None = None,
    ) -> RunResult:
        return cls(
            engine=engine,
            model=model,
            requests=len(measured.token_ids) + len(measured.failures),
            failed_requests=len(measured.failures),
            failures=dict(measured.failures),
            prompt_tokens=prompt_tokens,
            prompt_tokens_computed=measured.prompt_tokens_computed,
            prompt_tokens_found=measured.prompt_tokens_found,
            token_ids_sha256=measured.token_ids_sha256,
            output_tokens=measured.output_tokens,
            output_tokens_per_s=measured.output_tokens / measured.wall_s,
            wall_s=measured.wall_s,
            compile_s=measured.compile_s,
            compiled_programs=measured.compiled_programs,
            compiled_while_measured=measured.compiled_while_measured,
            steps=measured.steps,
            useful_row_steps=measured.useful_row_steps,
            wasted_row_steps=measured.wasted_row_steps,
            preemptions=measured.preemptions,
            ttft_s=Spread.of(measured.ttft_s.values()),
            latency_s=Spread.of(measured.latency_s.values()),
            kv_share=KVShare.of(measured.history, num_pages=measured.num_pages, page_size=measured.page_size),
            peak_rss_bytes=peak_rss_bytes,
            device=device,
            jax_version=jax_version,
            threads=usable_cores(),
            config=config,
            breakdown=breakdown,
        )

    @property
    def complete(self) -> bool:
        return self.failed_requests == 0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "kv_share": self.kv_share.to_json(), "complete": self.complete}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RunResult:
        data = {key: value for key, value in data.items() if key != "complete"}
        share = {k: data["kv_share"][k] for k in KVShare.__dataclass_fields__}
        spreads = {k: None if data[k] is None else Spread(**data[k]) for k in ("ttft_s", "latency_s")}
        return cls(**{**data, **spreads, "kv_share": KVShare(**share)})


@dataclass(frozen=True)
class Report:
    """Results of one invocation: one workload, one machine, the engines one after the other.

    `difference` is the first request on which two engines disagree, None if they agree or if `checked` is
    False because there was nothing to compare.
    """

    workload: dict[str, Any]
    runs: tuple[RunResult, ...]
    checked: bool = False
    difference: str | None = None

    @property
    def complete(self) -> bool:
        return all(run.complete for run in self.runs)

    @property
    def ratios(self) -> dict[str, dict[str, float]]:
        """`first_over_other`: the first run's value over the other's. Empty where a run is partial."""
        if not self.complete or not self.runs:
            return {}
        first, *others = self.runs
        found = {}
        for other in others:
            pairs = {key: (_lookup(first, key), _lookup(other, key)) for key in RATIO_KEYS}
            found[f"{first.engine}_over_{other.engine}"] = {
                key: one / two for key, (one, two) in pairs.items() if one is not None and two
            }
        return found

    @property
    def problems(self) -> list[str]:
        """Why the numbers must not be used, in words; empty if they may."""
        found = [
            f"{run.engine}: {run.failed_requests} of {run.requests} requests failed, first "
            f"{next(iter(run.failures.items()))}; this run is partial and is not compared"
            for run in self.runs
            if not run.complete
        ]
        found += [
            f"{run.engine}: {run.compiled_while_measured} program(s) were compiled while the clock ran"
            for run in self.runs
            if run.compiled_while_measured
        ]
        if self.difference is not None:
            found.append(f"token ids differ between engines: {self.difference}")
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "runs": [run.to_json() for run in self.runs],
            "ratios": self.ratios,
            "complete": self.complete,
            "check": {"done": self.checked, "difference": self.difference},
            "host": {"python": platform.python_version(), "machine": platform.machine()},
        }

    def last_line(self) -> str:
        """The report as JSON on one line."""
        return json.dumps(self.to_json(), allow_nan=False)

    def write(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def print(self, console: Console) -> None:
        """The tables, and below them what is wrong with the numbers, if anything is. They fit into 80 columns."""
        console.print(self.table())
        if self.ratios and len(self.runs) > 2:  # beside the runs they would not fit
            console.print(self.ratio_table())
        for run in self.runs:
            if run.breakdown is not None:
                for table in breakdown_tables(run.engine, run.breakdown):
                    console.print(table)
        for problem in self.problems:
            console.print(f"warning: {problem}", markup=False, highlight=False, soft_wrap=True)

    def table(self) -> Table:
        """The runs side by side; where there are two, their ratio as well."""
        return self._table(_ROWS, _title(self.workload), values=True, ratios=len(self.runs) == 2)

    def ratio_table(self) -> Table:
        """The ratios of the first run to each of the others."""
        rows = [row for row in _ROWS if row[1] in RATIO_KEYS]
        return self._table(rows, "ratios", values=False, ratios=True)

    def _table(self, rows: Sequence[tuple], title: str, *, values: bool, ratios: bool) -> Table:
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("")
        for run in self.runs if values else ():
            table.add_column(run.engine, justify="right")
        found = list(self.ratios.values()) or [{} for _ in self.runs[1:]]  # none where a run is partial
        for run in self.runs[1:] if ratios else ():
            table.add_column(f"{self.runs[0].engine} / {run.engine}", justify="right")
        for label, key, show in rows:
            of_runs = [_lookup(run, key) for run in self.runs]
            if all(value is None for value in of_runs):
                continue
            cells = ["-" if value is None else show(value) for value in of_runs] if values else []
            table.add_row(label, *cells, *(f"{r[key]:.2f}" if key in r else "" for r in found if ratios))
        return table


def breakdown_tables(engine: str, breakdown: dict[str, Any]) -> list[Table]:
    """Where the time of a run went, from a `Breakdown` as JSON: of the whole run, and of a step of each budget."""
    budgets = breakdown["profiled_by_budget"]
    bursts = sum(profile["bursts"] for profile in budgets.values())
    whole = Table(
        title=f"{engine}: where the time of the run went",
        title_justify="left",
        caption=f"Shares of {bursts} profiled bursts of a second run, scaled to the measured time. Profiling makes "
        "small operations longer, so their shares are upper bounds.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in ("", "share", "time"):
        whole.add_column(column, justify="right" if column else "left")
    for key, share in breakdown["share"].items():
        whole.add_row(_CATEGORIES[key], _percent(share), _seconds(breakdown["category_s"][key]))
    whole.add_row("the whole run", _percent(1), _seconds(breakdown["wall_s"]), end_section=True)
    rest = breakdown["outside_products_of_run_share"]
    whole.add_row("measured time less profiled products", _percent(rest), _seconds(rest * breakdown["wall_s"]))
    kernel = breakdown["attention_kernel_s"]
    whole.add_row(
        "measured time less products and attention kernel",
        _percent(rest - kernel / breakdown["wall_s"]),
        _seconds(rest * breakdown["wall_s"] - kernel),
    )
    steps = Table(
        title="ms in a step, by token budget",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),  # nine columns, in 80
    )
    for column in ("tokens", "steps", "step", *(_SHORT[key] for key in breakdown["share"])):
        steps.add_column(column, justify="right")
    for budget, profile in budgets.items():
        parts = (_milliseconds(profile["category_step_s"][key]) for key in breakdown["share"])
        count = breakdown["steps_by_budget"].get(budget, 0)
        steps.add_row(budget, _count(count), _milliseconds(profile["step_s"]), *parts)
    return [whole, steps]


def usable_cores() -> int:
    """Cores this process may run on: on a CPU, XLA starts as many threads."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _title(workload: dict[str, Any]) -> str:
    return (
        f"{workload['name']}: {workload['requests']} requests, {workload['prompt_tokens']:,} prompt tokens, "
        f"{workload['output_tokens']:,} output tokens"
    )


def _lookup(run: RunResult, key: str) -> float | None:
    value: Any = run.to_json()
    for part in key.split("."):
        if value is None:
            return None
        value = value[part]
    return value


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


def _milliseconds(value: float) -> str:
    return f"{1000 * value:.1f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _bytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB"


_CATEGORIES = {
    "weight_products": "products with weights",
    "attention_products": "products of attention in XLA",
    "attention_kernel": "attention kernel, its products included",
    "attention_other": "other operations of attention",
    "other_operations": "all other operations",
    "between": "between operations: dispatch, host",
}
#: The same as the head of a narrow column.
_SHORT = {
    "weight_products": "weights",
    "attention_products": "att. prod.",
    "attention_kernel": "att. kernel",
    "attention_other": "att. other",
    "other_operations": "other",
    "between": "between",
}
_ROWS = (
    ("output tokens/s", "output_tokens_per_s", lambda value: f"{value:.1f}"),
    ("output tokens", "output_tokens", _count),
    ("requests failed", "failed_requests", _count),
    ("wall time", "wall_s", _seconds),
    ("compile time (not in it)", "compile_s", _seconds),
    ("programs compiled", "compiled_programs", _count),
    ("time to first token, median", "ttft_s.p50", _seconds),
    ("time to first token, p99", "ttft_s.p99", _seconds),
    ("latency of a request, median", "latency_s.p50", _seconds),
    ("latency of a request, p99", "latency_s.p99", _seconds),
    ("steps", "steps", _count),
    ("row-steps useful", "useful_row_steps", _count),
    ("row-steps wasted", "wasted_row_steps", _count),
    ("preemptions", "preemptions", _count),
    ("prompt tokens computed", "prompt_tokens_computed", _count),
    ("prompt tokens found", "prompt_tokens_found", _count),
    ("tokens in a page", "kv_share.page_size", _count),
    ("pages in use, peak", "kv_share.reserved_pages_peak", _count),
    ("KV tokens allocated", "kv_share.allocated_tokens", _count),
    ("KV tokens reserved, peak", "kv_share.reserved_tokens_peak", _count),
    ("KV tokens reserved, mean", "kv_share.reserved_tokens_mean", _count),
    ("KV tokens used, mean", "kv_share.used_tokens_mean", _count),
    ("used of reserved", "kv_share.used_of_reserved", _percent),
    ("if by longest of batch, mean", "kv_share.longest_of_batch_tokens_mean", _count),
    ("used of longest of batch", "kv_share.used_of_longest_of_batch", _percent),
    ("used of allocated", "kv_share.used_of_allocated", _percent),
    ("peak memory of the process", "peak_rss_bytes", _bytes),
)
