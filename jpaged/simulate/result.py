"""What a simulation tells: times of requests, totals, a table, a picture."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from jpaged.config import EngineConfig
from jpaged.record.stats import Spread
from jpaged.runtime.costs import CostModel
from jpaged.simulate.traffic import Traffic
from jpaged.step import StepRecord
from jpaged.viz.pages import COLOURS, LINE_STYLES, Picture


@dataclass(frozen=True, eq=False)
class SimulatedRun:
    """What became of the requests under one policy, at one load, with one page size. Arrays `[N]` are numpy's, in the
    order of the traffic; times are seconds."""

    policy: str
    load: float
    page_size: int
    num_pages: int
    arrival_s: np.ndarray  # [N] float64, from the start
    ttft_s: np.ndarray  # [N] float64, from arrival to the first token
    latency_s: np.ndarray  # [N] float64, from arrival to the last
    seconds: float  # from the first arrival to the last end
    steps: int
    output_tokens: int
    computed_tokens: int
    preemptions: int
    prefix_queries: int  # tokens of all prompts
    prefix_hits: int  # those that were found computed
    most_pages: int  # in use in any step
    records: tuple[StepRecord, ...] = ()  # of each step, as numpy arrays, where they were asked for

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def prefix_hit_rate(self) -> float:
        return self.prefix_hits / self.prefix_queries

    @property
    def name(self) -> str:
        return f"{self.policy}, load {self.load:g}, pages of {self.page_size}"

    def __repr__(self) -> str:
        ttft, latency = (f"{np.median(times):.2f}" for times in (self.ttft_s, self.latency_s))
        return (
            f"SimulatedRun({self.name}: {len(self.ttft_s):,} requests in {self.seconds:,.1f} s, "
            f"{self.output_tokens_per_s:,.0f} output tokens/s, {self.steps:,} steps, time to first token {ttft} s and "
            f"latency {latency} s as medians)"
        )


@dataclass(frozen=True, eq=False)
class Simulation:
    """All runs of one call of `simulate`."""

    traffic: Traffic
    config: EngineConfig
    costs: CostModel
    runs: tuple[SimulatedRun, ...]
    wall_s: float  # that simulating took, compiling included

    def __len__(self) -> int:
        return len(self.runs)

    def run(
        self, policy: str | None = None, *, load: float | None = None, page_size: int | None = None
    ) -> SimulatedRun:
        """The run with that policy, load and page size; what is left out need not be given where one is left.

        Raises:
            ValueError: there is none, or there are several.
        """
        asked = {"policy": policy, "load": load, "page_size": page_size}
        asked = {name: value for name, value in asked.items() if value is not None}
        found = [run for run in self.runs if all(getattr(run, name) == value for name, value in asked.items())]
        if len(found) != 1:
            raise ValueError(f"{len(found)} runs have {asked}; there are: {'; '.join(run.name for run in self.runs)}")
        return found[0]

    def rows(self) -> list[dict[str, str]]:
        """The figures of each run, by heading. Times are percentiles over requests, in seconds; found is the share of
        prompt tokens that were computed already."""
        rows = []
        for run in self.runs:
            spreads = {"ttft": Spread.of(run.ttft_s), "latency": Spread.of(run.latency_s)}
            rows.append(
                {"policy": run.policy, "load": f"{run.load:g}", "page size": f"{run.page_size}"}
                | {
                    f"{name} {share}": f"{getattr(spread, share):,.2f}"
                    for name, spread in spreads.items()
                    for share in ("p50", "p90", "p99")
                }
                | {
                    "output tokens/s": f"{run.output_tokens_per_s:,.0f}",
                    "steps": f"{run.steps:,}",
                    "preempted": f"{run.preemptions:,}",
                    "found": f"{run.prefix_hit_rate:.1%}",
                    "pages": f"{run.most_pages:,} of {run.num_pages:,}",
                }
            )
        return rows

    def table(self) -> Table:
        """`rows`, for a terminal."""
        table = Table(title=self._title, title_justify="left", title_style="")
        rows = self.rows()
        for head in rows[0]:
            table.add_column(head, justify="left" if head == "policy" else "right")
        for row in rows:
            table.add_row(*row.values())
        return table

    @property
    def _title(self) -> str:
        config = self.config
        return (
            f"{len(self.traffic):,} requests, {config.max_num_seqs} slots, {config.max_num_batched_tokens} tokens a "
            f"step, simulated for {self.costs.machine.name} in {self.wall_s:,.1f} s"
        )

    def __repr__(self) -> str:
        console = Console(width=200, color_system=None, force_jupyter=False)
        with console.capture() as capture:
            console.print(self.table())
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def _repr_html_(self) -> str:
        rows = self.rows()
        lines = [[f"<th>{escape(head)}</th>" for head in rows[0]]]
        lines += [[f"<td>{escape(value)}</td>" for value in row.values()] for row in rows]
        body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in lines)
        return f"<table><caption>{escape(self._title)}</caption>{body}</table>"

    def plot(self, times: str = "latency_s") -> Figure:
        """The share of requests that waited no longer than that, a line for each run.

        Args:
            times: "latency_s" or "ttft_s".
        """
        labels = {"latency_s": "latency", "ttft_s": "time to first token"}
        if times not in labels:
            raise ValueError(f"times must be one of {tuple(labels)}, got {times!r}")
        figure = Picture(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        for number, run in enumerate(self.runs):
            colour, dashes = COLOURS[number % len(COLOURS)], LINE_STYLES[number // len(COLOURS) % len(LINE_STYLES)]
            ordered = np.sort(getattr(run, times))
            axes.plot(ordered, np.arange(1, 1 + len(ordered)) / len(ordered), dashes, color=colour, label=run.name)
        axes.set_xscale("log")
        axes.set_xlabel(f"{labels[times]}, seconds")
        axes.set_ylabel("share of requests")
        axes.set_ylim(0, 1)
        axes.grid(True, alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.15), frameon=False)
        return figure
