"""Running engines one after the other, each in a process of its own, and putting their results together.

A process of its own makes peak memory mean something, gives each engine the same cold start, and lets the
number of threads be set before JAX starts its own. Parent and child speak through two JSON files in a
directory that is removed at the end; the child's progress goes to the terminal through stderr.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jpaged.bench.measure import Measurement, first_difference
from jpaged.bench.report import Report, RunResult
from jpaged.bench.workload import Workload, load_workload, synthetic_workload

ENGINES = ("continuous", "static")


def run_name(engine: str, *, enable_prefix_caching: bool) -> str:
    """What a run is called in reports: `unshared` is the continuous engine without prefix caching."""
    return engine if engine == "static" or enable_prefix_caching else "unshared"


@dataclass(frozen=True)
class WorkloadSpec:
    """Where the requests come from: `path` of a file, or the numbers of a synthetic workload (the vocabulary
    is the model's; a `shared_prefix` of so many tokens begins every prompt). `head` keeps the first requests only."""

    path: str | None = None
    count: int = 32
    seed: int = 0
    prompt_tokens: tuple[int, int] = (16, 512)
    output_tokens: tuple[int, int] = (8, 256)
    shared_prefix: int = 0
    head: int | None = None

    def __post_init__(self):
        if self.path is not None and self.shared_prefix:
            raise ValueError(
                f"the prompts of {self.path} begin as they do: a shared prefix (of {self.shared_prefix} tokens) is for "
                "the synthetic mix; leave out the one or the other"
            )

    def make(self, vocab_size: int) -> Workload:
        """The workload. Raises ValueError if the file is not one, or was made for a larger vocabulary."""
        if self.path is not None:
            workload = load_workload(self.path)
            if workload.max_token_id >= vocab_size:
                raise ValueError(
                    f"{self.path}: token id {workload.max_token_id} lies outside the model's vocabulary of "
                    f"{vocab_size}; the file was made for another model"
                )
        else:
            workload = synthetic_workload(
                self.count,
                seed=self.seed,
                token_ids=(0, vocab_size - 1),
                prompt_tokens=self.prompt_tokens,
                output_tokens=self.output_tokens,
                shared_prefix=self.shared_prefix,
            )
        return workload if self.head is None else workload.head(self.head)


@dataclass(frozen=True)
class BenchJob:
    """One engine's run. `config` holds fields of EngineConfig; where it gives no `max_model_len`, the longest
    request of the workload decides it, for both engines: static batching reserves no more than it must.
    """

    engine: str
    model: str
    workload: WorkloadSpec = WorkloadSpec()
    config: dict[str, Any] = field(default_factory=dict)
    static_batch_size: int | None = None  # None: as many as the continuous engine has slots
    threads: int | None = None  # cores to run on; None: all there are
    breakdown: bool = False

    def __post_init__(self):
        if self.engine not in ENGINES:
            raise ValueError(f"engine must be one of {ENGINES}, got {self.engine!r}")
        for name in ("static_batch_size", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def name(self) -> str:
        """Of the run, in reports."""
        return run_name(self.engine, enable_prefix_caching=self.config.get("enable_prefix_caching", True))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BenchJob:
        spec = dict(data["workload"])
        spec |= {key: tuple(spec[key]) for key in ("prompt_tokens", "output_tokens")}
        return cls(**{**data, "workload": WorkloadSpec(**spec)})


@dataclass(frozen=True)
class Outcome:
    """What a child reports: the workload it ran, its result, and all it measured."""

    workload: dict[str, Any]
    result: RunResult
    measured: Measurement

    def to_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "result": self.result.to_json(),
            "measured": self.measured.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        result, measured = RunResult.from_json(data["result"]), Measurement.from_json(data["measured"])
        return cls(data["workload"], result, measured)


class ChildFailed(RuntimeError):
    """A child process ended without a result; what it had to say stands on stderr."""

    def __init__(self, name: str, code: int):
        super().__init__(f"the {name} engine ended with exit status {code} and without a result")
        self.code = code


def run_in_child(job: BenchJob) -> Outcome:
    """Runs a job in a fresh Python process and returns what it measured.

    Raises:
        ChildFailed: the process ended without a result.
    """
    with tempfile.TemporaryDirectory(prefix="jpaged-bench-") as directory:
        asked, answered = Path(directory, "job.json"), Path(directory, "outcome.json")
        asked.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [sys.executable, "-m", "jpaged.bench.child", str(asked), str(answered)]
        done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        if done.returncode or not answered.exists():
            raise ChildFailed(job.name, done.returncode)
        return Outcome.from_json(json.loads(answered.read_text(encoding="utf-8")))


def jobs_of(job: BenchJob, engines: str) -> list[BenchJob]:
    """The runs that are compared: the job through one of `ENGINES`, through "both", or through "all": continuous, the
    same without prefix caching, and static.

    Raises:
        ValueError: there is no such choice, or two of the runs would be one.
    """
    if engines in ("both", *ENGINES):
        return [replace(job, engine=engine) for engine in (ENGINES if engines == "both" else (engines,))]
    if engines != "all":
        raise ValueError(f"engine must be one of {(*ENGINES, 'both', 'all')}, got {engines!r}")
    continuous = replace(job, engine="continuous")
    if continuous.name == "unshared":
        raise ValueError("engine 'all' runs with prefix caching and without; do not disable it, or choose 'both'")
    unshared = replace(continuous, config=job.config | {"enable_prefix_caching": False})
    return [continuous, unshared, replace(job, engine="static")]


def run_all(jobs: Sequence[BenchJob]) -> list[Outcome]:
    """Each job in turn."""
    return [run_in_child(job) for job in jobs]


def make_report(outcomes: Sequence[Outcome], *, check: bool) -> Report:
    """The results side by side; with `check`, all token ids are compared with those of the first engine."""
    first, *others = outcomes
    for other in others:
        if other.workload["sha256"] != first.workload["sha256"]:
            raise ValueError("the engines did not run the same workload; has the file changed meanwhile?")
    difference = None
    if check:
        found = ((other, first_difference(first.measured, other.measured)) for other in others)
        named = (f"{text} ({first.result.engine} and {other.result.engine})" for other, text in found if text)
        difference = next(named, None)
    return Report(
        workload=first.workload,
        runs=tuple(outcome.result for outcome in outcomes),
        checked=check and bool(others),
        difference=difference,
    )
