"""What a run counts and what a report says of it, on an engine of plain Python with known numbers."""

import json
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from jpaged.bench.breakdown import CATEGORIES, Breakdown, BudgetProfile
from jpaged.bench.measure import EngineAdapter, Measurement, StepSample, first_difference, peak_rss_bytes
from jpaged.bench.report import KVShare, Report, RunResult
from jpaged.bench.workload import Workload, WorkloadRequest
from jpaged.record.stats import Spread
from jpaged.request import FinishReason


class Clock:
    """Time that passes only when a burst or a sleep takes some."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@dataclass
class Event:
    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None = None


class FakeEngine:
    """Gives each request one token a burst: its id times 100 plus the place. A burst takes a second.

    `broken` requests end in ERROR after one token, `short` ones stop one token early, and a prompt of more
    than 8 tokens is refused.
    """

    compile_seconds = 2.5

    def __init__(self, clock, *, broken=(), short=(), compiles_late=False):
        self.clock, self.broken, self.short, self.compiles_late = clock, broken, short, compiles_late
        self.running: dict[str, list] = {}
        self.history: list = []
        self.num_programs = 0
        self.steps = 0

    def warmup(self):
        self.num_programs = 3

    def reset_prefix_cache(self):
        return True

    @property
    def has_work(self):
        return bool(self.running)

    def submit(self, request):
        if len(request.prompt_token_ids) > 8:
            raise ValueError("needs 9 pages, there are 8")
        self.running[request.request_id] = [request, 0]

    def burst(self):
        self.clock.now += 1.0
        self.steps += 1
        if self.compiles_late and "warmup" not in self.running:
            self.num_programs = 4
        events = []
        count = len(self.running)
        for key, entry in list(self.running.items()):
            request, made = entry
            entry[1] += 1
            last = made + 1 == request.params.max_tokens - (key in self.short)
            reason = FinishReason.ERROR if key in self.broken else FinishReason.LENGTH if last else None
            events.append(Event(key, (int(key) if key.isdigit() else 0) * 100 + made, reason))
            if reason is not None:
                del self.running[key]
        self.history.append(
            SimpleNamespace(
                step=self.steps, running=count, waiting=0, pages_in_use=2 * count, tokens_in_pages=5 * count,
                scheduled_tokens=count, budget=4, longest_of_batch_tokens=0,
            )
        )  # fmt: skip
        return events

    def stats(self):
        return SimpleNamespace(
            steps=self.steps, useful_row_steps=3 * self.steps, wasted_row_steps=self.steps, preemptions=0,
            total_pages=20, prefix_queries=9 * self.steps, prefix_hits=4 * self.steps,
        )  # fmt: skip


def workload(count=10, **changes):
    requests = tuple(WorkloadRequest(str(i), 0.0, (1, 2, 3), 2 + i % 3) for i in range(count))
    return Workload("fake", tuple(replace(r, **changes.get(r.request_id, {})) for r in requests))


def measure(work, **engine_options):
    clock = Clock()
    engine = FakeEngine(clock, **engine_options)
    adapter = EngineAdapter("fake", engine, page_size=4, clock=clock, sleep=clock.sleep)
    adapter.warmup(work)
    seen = []
    measured = adapter.run(work, progress=seen.append)
    return measured, seen


def result(measured, engine="fake", **changes):
    made = RunResult.of(
        measured,
        engine=engine,
        model="stub",
        prompt_tokens=30,
        peak_rss_bytes=2**30,
        device="cpu",
        jax_version="0",
        config={"page_size": 4},
    )
    return replace(made, **changes)


def report(*runs, **options):
    return Report(workload().summary(), tuple(runs), **options)


def test_counts_and_times_of_a_complete_run():
    work = workload()
    measured, seen = measure(work)
    assert measured.failures == {}
    assert measured.output_tokens == work.output_tokens == sum(seen)
    assert measured.token_ids["2"] == (200, 201, 202, 203)
    assert measured.ttft_s == {str(i): 1.0 for i in range(10)}
    assert measured.latency_s == {str(i): 2.0 + i % 3 for i in range(10)}
    assert measured.wall_s == 4.0
    assert (measured.compile_s, measured.compiled_programs, measured.compiled_while_measured) == (2.5, 3, 0)
    assert (measured.steps, measured.useful_row_steps, measured.wasted_row_steps) == (4, 12, 4)
    assert (measured.prompt_tokens_found, measured.prompt_tokens_computed) == (16, 20)
    run = result(measured)
    assert run.output_tokens_per_s == work.output_tokens / 4.0
    assert (run.requests, run.failed_requests, run.complete) == (10, 0, True)


def test_a_request_arrives_when_it_says_and_its_times_count_from_there():
    work = workload(3, **{"1": {"arrival_s": 1.5}, "2": {"arrival_s": 10.0}})
    measured, _ = measure(work)
    # 0 runs over seconds 0 to 2; 1 arrives within the second burst and is seen after the third; 2 finds the
    # engine idle
    assert measured.ttft_s == {"0": 1.0, "1": 1.5, "2": 1.0}
    assert measured.wall_s == 14.0


def test_counters_are_those_of_the_run_alone():
    clock = Clock()
    adapter = EngineAdapter("fake", FakeEngine(clock), page_size=4, clock=clock, sleep=clock.sleep)
    adapter.warmup(workload())
    first, second = adapter.run(workload()), adapter.run(workload())
    assert (first.steps, len(first.history)) == (second.steps, len(second.history)) == (4, 4)
    assert (first.history[0].step, second.history[0].step) == (3, 7)  # two steps went to the warm-up
    assert first_difference(first, second) is None


def test_a_run_does_not_start_on_a_busy_engine():
    clock = Clock()
    engine = FakeEngine(clock)
    engine.submit(workload().requests[0].to_request())
    adapter = EngineAdapter("fake", engine, page_size=4, clock=clock, sleep=clock.sleep)
    with pytest.raises(RuntimeError, match="still has requests"):
        adapter.run(workload())


def test_failed_requests_are_reported_and_their_tokens_are_not_counted():
    """ME-04: of 10 requests 3 are made to fail, each in its own way."""
    work = workload(10, **{"4": {"prompt_token_ids": tuple(range(9))}})
    measured, _ = measure(work, broken=("1",), short=("7",))
    assert set(measured.failures) == {"1", "4", "7"}
    assert measured.failures["1"] == "ended by error"
    assert measured.failures["4"] == "refused: needs 9 pages, there are 8"
    assert measured.failures["7"] == "2 tokens came back instead of 3"
    run = result(measured)
    assert (run.requests, run.failed_requests, len(measured.token_ids)) == (10, 3, 7)
    kept = [r.max_tokens for r in work.requests if r.request_id not in measured.failures]
    assert run.output_tokens == sum(kept) == sum(len(ids) for ids in measured.token_ids.values())


def test_a_partial_run_is_refused():
    whole, part = (
        result(measure(workload())[0], "continuous"),
        result(measure(workload(), broken=("1",))[0], "static"),
    )
    refused = report(whole, part)
    assert refused.complete is False
    assert refused.ratios == {}
    assert refused.to_json()["complete"] is False
    (problem,) = refused.problems
    assert "static: 1 of 10 requests failed" in problem
    assert "not compared" in problem


def test_a_run_of_which_nothing_was_completed_still_has_a_report():
    measured, _ = measure(workload(2), broken=("0", "1"))
    run = result(measured)
    assert (run.output_tokens, run.output_tokens_per_s, run.ttft_s, run.latency_s) == (0, 0.0, None, None)
    json.loads(report(run).last_line())
    Console(width=200, file=open_null()).print(report(run).table())


def open_null():
    import io

    return io.StringIO()


def test_compiling_while_the_clock_runs_is_a_problem():
    measured, _ = measure(workload(), compiles_late=True)
    assert measured.compiled_while_measured == 1
    assert "1 program(s) were compiled while the clock ran" in report(result(measured)).problems[0]


def test_the_first_difference_names_request_and_place():
    one, _ = measure(workload())
    other = replace(one, token_ids={**one.token_ids, "3": (300, 7), "5": (1,)})
    assert first_difference(one, other) == "request '3' differs at output token 1: 301 and 7"
    shorter = replace(one, token_ids={**one.token_ids, "3": (300,)})
    assert first_difference(one, shorter) == "request '3' differs at output token 1: 301 and nothing"
    missing = replace(one, token_ids={k: v for k, v in one.token_ids.items() if k != "6"})
    assert first_difference(one, missing) == first_difference(missing, one)
    assert first_difference(missing, one) == "request '6' was completed in one run only"
    told = report(result(one, "a"), result(other, "b"), checked=True, difference=first_difference(one, other))
    assert "token ids differ between engines: request '3'" in told.problems[0]


def test_shares_are_means_over_the_steps_in_which_requests_run():
    def sample(pages, tokens):
        return StepSample(0, 1, 0, pages, tokens, 1, 1)

    share = KVShare.of([sample(4, 30), sample(2, 6), sample(0, 0)], num_pages=10, page_size=10)
    assert share.to_json() == {
        "allocated_tokens": 100,
        "page_size": 10,
        "reserved_pages_peak": 4,
        "reserved_tokens_peak": 40,
        "reserved_tokens_mean": 30.0,
        "used_tokens_mean": 18.0,
        "used_of_reserved": 0.6,
        "used_of_allocated": 0.18,
        "longest_of_batch_tokens_mean": None,
        "used_of_longest_of_batch": None,
    }
    assert KVShare.of([], num_pages=10, page_size=10).to_json()["used_of_reserved"] == 0.0


def test_percentiles_are_values_that_occurred():
    assert Spread.of(range(1, 101)) == Spread(50, 90, 99, 50.5)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 3.0)
    assert Spread.of([]) is None


def test_ratios_are_of_the_first_run_to_the_other():
    measured, _ = measure(workload())
    slower = replace(measured, wall_s=8.0, steps=10)
    ratios = report(result(measured, "continuous"), result(slower, "static")).ratios["continuous_over_static"]
    assert ratios["output_tokens_per_s"] == 2.0
    assert ratios["wall_s"] == 0.5
    assert ratios["steps"] == 0.4
    assert report(result(measured)).ratios == {}


def broken_down():
    """4 s of 3 steps of 4 tokens and one of 16: half of it in products with weights, as JSON."""
    spent = dict(zip(CATEGORIES, (0.5, 0.125, 0.125, 0.125, 0.0625, 0.0625), strict=True))
    profiles = {
        4: BudgetProfile(2, 2, 2.0, {c: 2 * s for c, s in spent.items()}),
        16: BudgetProfile(1, 1, 1.0, spent),
    }
    return Breakdown(4.0, {4: 3, 16: 1}, profiles).to_json()


def test_the_json_has_the_promised_keys_and_comes_back(tmp_path):
    measured, _ = measure(workload())
    runs = (
        result(measured, "continuous", breakdown=broken_down()),
        result(measured, "static"),
    )
    made = report(*runs, checked=True)
    made.write(tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())
    assert written == json.loads(made.last_line())
    assert "\n" not in made.last_line()
    assert [run["engine"] for run in written["runs"]] == ["continuous", "static"]
    for key in (
        "output_tokens_per_s",
        "wall_s",
        "compile_s",
        "peak_rss_bytes",
        "threads",
        "wasted_row_steps",
    ):
        assert isinstance(written["runs"][0][key], int | float)
    assert set(written["runs"][0]["ttft_s"]) == {"p50", "p90", "p99", "mean"}
    assert written["workload"]["sha256"] == workload().sha256
    assert written["check"] == {"done": True, "difference": None}
    assert tuple(RunResult.from_json(run) for run in written["runs"]) == runs
    assert Measurement.from_json(json.loads(json.dumps(measured.to_json()))) == measured


def printed(made, width=80):
    """What `made` prints on a terminal of so many columns, as lines."""
    out = open_null()
    made.print(Console(width=width, file=out))
    return [line.strip() for line in out.getvalue().splitlines()]


def cells(lines, label):
    """The cells of the row that begins with `label`."""
    (line,) = [line for line in lines if line.startswith(label + "  ")]
    return re.split(r"\s{2,}", line)[1:]


def test_the_table_compares_in_words():
    measured, _ = measure(workload())
    slower = replace(measured, wall_s=8.0)
    lines = printed(report(result(measured, "continuous"), result(slower, "static")))
    assert any("continuous / static" in line for line in lines)
    assert cells(lines, "output tokens/s") == ["7.2", "3.6", "2.00"]


def test_the_first_run_is_compared_with_each_of_the_others():
    """Catches: a ratio that stands under another run's name, and a table of three runs that 80 columns cut."""
    measured, _ = measure(workload())
    names = ("continuous", "unshared", "static")
    runs = [result(replace(measured, wall_s=4.0 * n), name) for n, name in enumerate(names, start=1)]
    lines = printed(report(*runs))
    assert any(line.split() == list(names) for line in lines)
    assert any(re.split(r"\s{2,}", line) == ["continuous / unshared", "continuous / static"] for line in lines)
    walls = [re.split(r"\s{2,}", line)[1:] for line in lines if line.startswith("wall time  ")]
    assert walls == [["4.00 s", "8.00 s", "12.00 s"], ["0.50", "0.33"]]
    assert not any("…" in line for line in lines)


def test_static_batching_is_shown_with_both_reservations():
    """Catches: a baseline that reserves `max_model_len` a row, with no word of what a thriftier one would reserve."""
    steps = [StepSample(1, 2, 0, 2, 6, 4, 4, longest_of_batch_tokens=20), StepSample(2, 1, 0, 2, 4, 2, 4, 20)]
    share = KVShare.of(steps, num_pages=4, page_size=64)
    assert (share.reserved_tokens_mean, share.longest_of_batch_tokens_mean) == (128, 20)
    assert share.to_json()["used_of_longest_of_batch"] == 5 / 20
    measured, _ = measure(workload())
    static = replace(result(measured, "static"), kv_share=share)
    lines = printed(report(result(measured, "continuous"), static))
    assert cells(lines, "if by longest of batch, mean") == ["-", "20"]


def test_a_breakdown_has_tables_of_its_own():
    """Catches: a table that 80 columns cut, and rows that only a footnote explains."""
    measured, _ = measure(workload())
    runs = result(measured, "continuous", breakdown=broken_down()), result(measured, "static")
    lines = printed(report(*runs))
    assert any("continuous: where the time of the run went" in line for line in lines)
    assert not any("static: where" in line or "…" in line for line in lines)
    assert "Profiling makes small operations longer" in " ".join(" ".join(lines).split())
    assert cells(lines, "products with weights") == ["50.0 %", "2.00 s"]
    assert cells(lines, "attention kernel, its products included") == ["12.5 %", "0.50 s"]
    assert cells(lines, "the whole run") == ["100.0 %", "4.00 s"]
    assert cells(lines, "measured time less profiled products") == ["37.5 %", "1.50 s"]
    assert cells(lines, "measured time less products and attention kernel") == ["25.0 %", "1.00 s"]
    rows = [line.split() for line in lines]
    assert ["4", "3", "1000.0", "500.0", "125.0", "125.0", "125.0", "62.5", "62.5"] in rows
    assert ["16", "1", "1000.0", "500.0", "125.0", "125.0", "125.0", "62.5", "62.5"] in rows


def test_peak_memory_is_that_of_this_process():
    before = peak_rss_bytes()
    block = bytearray(b"x" * (64 << 20))
    after = peak_rss_bytes()
    assert len(block) == 64 << 20
    assert 10 << 20 < before <= after < 1 << 40
    assert after >= 64 << 20
