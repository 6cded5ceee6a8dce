"""Running a workload through an engine, and what was seen.

Time is measured where a caller stands: a token counts as seen when the burst that made it has returned to the
host. Everything is compiled before the clock starts; the time that took is kept apart. Tokens are the ids
that were returned, and only those of requests that were completed.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from jpaged.bench.workload import Workload, WorkloadRequest
from jpaged.request import FinishReason, Request, SamplingParams
from jpaged.runtime.engine import Engine


class ServingEngine(Protocol):
    """What the continuous engine and the static baseline have in common."""

    @property
    def compile_seconds(self) -> float: ...
    @property
    def num_programs(self) -> int: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def history(self) -> Sequence[Any]: ...
    def warmup(self) -> None: ...
    def submit(self, request: Request) -> None: ...
    def burst(self) -> Iterable[Any]: ...
    def stats(self) -> Any: ...
    def abort_all(self) -> None: ...
    def reset_prefix_cache(self) -> bool: ...
    def burst_steps(self, budget: int) -> int: ...
    def program_text(self, budget: int) -> str: ...


@dataclass(frozen=True)
class StepSample:
    """One step, as the engine's history records it from the page tables on the device."""

    step: int
    running: int  # requests that have a slot
    waiting: int  # requests that have none yet
    pages_in_use: int  # pages that some request owns
    tokens_in_pages: int  # tokens whose keys and values are stored in them
    scheduled_tokens: int  # tokens this step computed for requests
    budget: int  # tokens this step computed in all, padding included
    longest_of_batch_tokens: int = 0  # as in `StepStats`; of static batching only

    @classmethod
    def of(cls, stats: Any) -> StepSample:
        return cls(**{f.name: int(getattr(stats, f.name)) for f in fields(cls)})


@dataclass(frozen=True)
class Measurement:
    """What one run of a workload showed. Times are seconds on one monotonic clock, from the start of the run;
    a request's own times count from its arrival."""

    token_ids: dict[str, tuple[int, ...]]  # by request id; completed requests only
    failures: dict[str, str]  # by request id: why it was not completed
    ttft_s: dict[str, float]  # to the first token
    latency_s: dict[str, float]  # to the last token
    wall_s: float
    compile_s: float
    compiled_programs: int
    compiled_while_measured: int  # programs that were compiled while the clock ran: 0 if warm-up did its work
    steps: int
    useful_row_steps: int  # tokens computed for requests
    wasted_row_steps: int  # padding that was computed beside them
    preemptions: int
    prompt_tokens_found: int  # tokens of prompts that were in the pool when their request was admitted, or soon after
    prompt_tokens_computed: int  # the other prompt tokens of admitted requests
    num_pages: int
    page_size: int
    history: tuple[StepSample, ...] = field(repr=False)

    @property
    def output_tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids.values())

    @property
    def token_ids_sha256(self) -> str:
        """Hex digest of `{request id: [token id, ...]}` as JSON with sorted keys, in Python's default spacing."""
        ids = {key: list(ids) for key, ids in self.token_ids.items()}
        return hashlib.sha256(json.dumps(ids, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["history"] = {f.name: [getattr(s, f.name) for s in self.history] for f in fields(StepSample)}
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measurement:
        columns = data["history"]
        rows = zip(*(columns[f.name] for f in fields(StepSample)), strict=True)
        history = tuple(StepSample(*row) for row in rows)
        token_ids = {key: tuple(ids) for key, ids in data["token_ids"].items()}
        return cls(**{**data, "token_ids": token_ids, "history": history})


class BenchEngine(Protocol):
    """Anything that can run a workload. `warmup` compiles and runs a little; `run` measures, and calls
    `progress(tokens)` with the count of new tokens after each burst."""

    name: str

    def warmup(self, workload: Workload, *, use_tqdm: bool = False) -> None: ...
    def run(self, workload: Workload, progress: Callable[[int], None] | None = None) -> Measurement: ...


class EngineAdapter:
    """A `ServingEngine` as a `BenchEngine`: submits requests as they arrive, runs bursts, notes the times."""

    def __init__(
        self,
        name: str,
        engine: ServingEngine,
        *,
        page_size: int,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.name = name
        self.engine = engine
        # As `LLM.generate` does. Static batching has its own schedule.
        self._burst = partial(engine.burst, ahead=True) if isinstance(engine, Engine) else engine.burst
        self._page_size = page_size
        self._clock = clock
        self._sleep = sleep

    def warmup(self, workload: Workload, *, use_tqdm: bool = False) -> None:
        """Compiles all programs, with a progress bar if asked for. Then runs one request with a prompt of the longest
        length: the first call of a program touches memory that later ones find touched. The prompt is of nothing but
        token 0, so that no prompt of the workload is found computed already."""
        if isinstance(self.engine, Engine):
            self.engine.warmup(use_tqdm=use_tqdm)
        else:
            self.engine.warmup()
        longest = max(len(r.prompt_token_ids) for r in workload.requests)
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        try:
            self.engine.submit(Request("warmup", (0,) * longest, params))
        except ValueError:  # the run will say so, of the request that is too long
            return
        while self.engine.has_work:
            self.engine.burst()

    def run(self, workload: Workload, progress: Callable[[int], None] | None = None) -> Measurement:
        engine, clock = self.engine, self._clock
        if engine.has_work:
            raise RuntimeError(f"{self.name} still has requests from before; a run must start with none")
        engine.reset_prefix_cache()  # and with nothing computed
        before, programs = engine.stats(), engine.num_programs
        # by arrival, the next one last; those that arrive together keep their order
        pending = sorted(workload.requests, key=lambda r: r.arrival_s)[::-1]
        log = {r.request_id: _RequestLog(r) for r in workload.requests}

        start = clock()
        while pending or engine.has_work:
            now = clock() - start
            while pending and pending[-1].arrival_s <= now:
                request = pending.pop()
                try:
                    engine.submit(request.to_request())
                except ValueError as error:  # refused: this request fails, the others go on
                    log[request.request_id].failure = f"refused: {error}"
            if not engine.has_work:
                if pending:
                    self._sleep(max(0.0, pending[-1].arrival_s - now))
                continue
            events = list(self._burst())
            now = clock() - start
            for event in events:
                log[event.request_id].note(event, now)
            if progress is not None:
                progress(len(events))
        wall = clock() - start

        after = engine.stats()
        found = after.prefix_hits - before.prefix_hits
        done = {key: entry for key, entry in log.items() if entry.problem is None}
        return Measurement(
            token_ids={key: tuple(entry.token_ids) for key, entry in done.items()},
            failures={key: entry.problem for key, entry in log.items() if entry.problem is not None},
            ttft_s={key: entry.first_s - entry.request.arrival_s for key, entry in done.items()},
            latency_s={key: entry.last_s - entry.request.arrival_s for key, entry in done.items()},
            wall_s=wall,
            compile_s=engine.compile_seconds,
            compiled_programs=engine.num_programs,
            compiled_while_measured=engine.num_programs - programs,
            steps=after.steps - before.steps,
            useful_row_steps=after.useful_row_steps - before.useful_row_steps,
            wasted_row_steps=after.wasted_row_steps - before.wasted_row_steps,
            preemptions=after.preemptions - before.preemptions,
            prompt_tokens_found=found,
            prompt_tokens_computed=after.prefix_queries - before.prefix_queries - found,
            num_pages=after.total_pages,
            page_size=self._page_size,
            history=tuple(StepSample.of(s) for s in engine.history if s.step > before.steps),
        )


@dataclass
class _RequestLog:
    request: WorkloadRequest
    token_ids: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0
    reason: FinishReason | None = None
    failure: str | None = None

    def note(self, event: Any, now: float) -> None:
        if event.token_id is not None:
            if not self.token_ids:
                self.first_s = now
            self.token_ids.append(int(event.token_id))
            self.last_s = now
        if event.finish_reason is not None:
            self.reason = FinishReason(event.finish_reason)

    @property
    def problem(self) -> str | None:
        """Why the request does not count as completed; None if it does."""
        if self.failure is not None:
            return self.failure
        if self.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return "never finished" if self.reason is None else f"ended by {self.reason}"
        if len(self.token_ids) != self.request.max_tokens:
            return f"{len(self.token_ids)} tokens came back instead of {self.request.max_tokens}"
        return None


def first_difference(one: Measurement, other: Measurement) -> str | None:
    """The first request, in the order of `one`, whose token ids differ between two runs, or None."""
    for key in [*one.token_ids, *(k for k in other.token_ids if k not in one.token_ids)]:
        a, b = one.token_ids.get(key), other.token_ids.get(key)
        if a is None or b is None:
            return f"request {key!r} was completed in one run only"
        if a != b:
            shorter = min(len(a), len(b))
            at = next((i for i in range(shorter) if a[i] != b[i]), shorter)
            shown = [str(ids[at]) if at < len(ids) else "nothing" for ids in (a, b)]
            return f"request {key!r} differs at output token {at}: {shown[0]} and {shown[1]}"
    return None


def peak_rss_bytes() -> int:
    """The most main memory this process has held, in bytes.

    On Linux this is the kernel's VmHWM, which starts anew when a program is executed; `ru_maxrss` would also
    count the parent that a child was forked from. Elsewhere it is `ru_maxrss`. It only means something in a
    process that has run one engine.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        pass
    import resource  # not on Windows, where nothing of this works

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
