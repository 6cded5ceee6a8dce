"""The command line as a user meets it: what it prints, what it refuses, and its exit status."""

import io
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

import jpaged.bench.compare as compare
import jpaged.cli as cli
import jpaged.startup as startup
from jpaged.bench.compare import BenchJob, Outcome, WorkloadSpec, make_report, run_in_child
from jpaged.bench.measure import Measurement, StepSample
from jpaged.bench.report import RunResult
from jpaged.demo import show_stream

VOCAB = 500


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def pretended(job, *, wrong=(), failed=()):
    """What a child would have measured: each request's tokens are 0, 1, 2, ..."""
    workload = job.workload.make(VOCAB)
    token_ids = {r.request_id: tuple(range(r.max_tokens)) for r in workload.requests if r.request_id not in failed}
    token_ids.update({key: (*token_ids[key][:-1], -1) for key in wrong})
    seconds = dict.fromkeys(token_ids, 1.0)
    measured = Measurement(
        token_ids=token_ids,
        failures=dict.fromkeys(failed, "ended by error"),
        ttft_s=seconds,
        latency_s=seconds,
        wall_s=2.0 if job.engine == "continuous" else 5.0,
        compile_s=1.0,
        compiled_programs=4,
        compiled_while_measured=0,
        steps=3,
        useful_row_steps=20,
        wasted_row_steps=4,
        preemptions=0,
        prompt_tokens_found=0,
        prompt_tokens_computed=workload.prompt_tokens,
        num_pages=10,
        page_size=16,
        history=tuple(StepSample(i, 2, 0, 3, 40, 8, 8) for i in range(3)),
    )
    result = RunResult.of(
        measured,
        engine=job.name,
        model=job.model,
        prompt_tokens=workload.prompt_tokens,
        peak_rss_bytes=2**30,
        device="cpu",
        jax_version="0",
        config=job.config,
    )
    return Outcome(workload.summary(), result, measured)


@pytest.fixture
def jobs(monkeypatch):
    """Children are pretended; the jobs they were given are kept."""
    seen = []

    def child(job):
        seen.append(job)
        return pretended(job)

    monkeypatch.setattr(compare, "run_in_child", child)
    return seen


def test_help_is_quick_and_starts_no_jax():
    code = "import sys, jpaged.cli; sys.exit('jax' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("demo", "bench", "convert", "sizing", "version"):
        assert command in result.output


def test_sizing_prints_the_arithmetic():
    result = invoke("sizing")
    assert result.exit_code == 0
    for number in ("80,000,000,000", "426,784", "3 requests", "52 requests", "213 requests"):
        assert number in result.output
    other = invoke("sizing", "--memory", "80GiB", "--reserved", 4096, "--average", 100)
    assert "467,280" in other.output
    assert "reserved at 4,096" in other.output
    assert "8,192" not in other.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sizing", "--memory", "80 bananas"), "looks like 80e9, 80GB or 80GiB, not '80 bananas'"),
        (("sizing", "--memory", "8GB"), "no room for a single page"),
        (("sizing", "--dtype", "int3"), "dtype must be one of"),
        (("bench", "--engine", "both", "--workload", "none.json"), "--workload: there is no file none.json"),
        (("bench", "--engine", "vllm"), "must be one of ('continuous', 'static', 'both', 'all'), got 'vllm'"),
        (("bench", "--engine", "all", "--no-enable-prefix-caching"), "'all' runs with prefix caching and without"),
        (("bench", "--shared-prefix", 9, "--workload", __file__), "begin as they do: a shared prefix (of 9"),
        (("bench", "--num-pages", 4, "--pool-bytes", 9), "give num_pages (4) or pool_bytes (9), not both"),
        (("bench", "--json", "no-such-place/report.json"), "--json: there is no directory"),
        (("bench", "--dtype", "int3"), "dtype must be 'auto' or one of"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, words, jobs):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "error: " in result.stderr
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert jobs == []


def test_bench_runs_both_engines_on_one_job_and_ends_with_json(jobs, tmp_path):
    target, picture = tmp_path / "report.json", tmp_path / "pages.png"
    result = invoke(
        "bench", "--synthetic", 5, "--seed", 3, "--prompt-tokens", 2, 6, "--output-tokens", 2, 4,
        "--max-num-seqs", 4, "--threads", 2, "--json", target, "--plot", picture,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [job.engine for job in jobs] == ["continuous", "static"]
    assert jobs[0] == replace(jobs[1], engine="continuous")
    assert jobs[0].workload == WorkloadSpec(None, 5, 3, (2, 6), (2, 4))
    assert (jobs[0].config["max_num_seqs"], jobs[0].threads) == (4, 2)
    last = json.loads(result.stdout.splitlines()[-1])
    assert last == json.loads(target.read_text())
    assert last["ratios"]["continuous_over_static"]["output_tokens_per_s"] == pytest.approx(2.5)
    assert last["check"] == {"done": True, "difference": None}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_shared_prefix_is_run_with_sharing_without_it_and_statically(jobs):
    """Catches: a run without sharing that shares, or that the report does not tell from the other."""
    result = invoke("bench", "--synthetic", 3, "--shared-prefix", 20)
    assert result.exit_code == 0, result.output
    assert [(job.name, job.engine) for job in jobs] == [
        ("continuous", "continuous"), ("unshared", "continuous"), ("static", "static"),
    ]  # fmt: skip
    assert [job.config["enable_prefix_caching"] for job in jobs] == [True, False, True]
    assert all(job.workload.shared_prefix == 20 for job in jobs)
    last = json.loads(result.stdout.splitlines()[-1])
    assert [run["engine"] for run in last["runs"]] == ["continuous", "unshared", "static"]
    assert set(last["ratios"]) == {"continuous_over_unshared", "continuous_over_static"}
    assert "continuous / unshared" in result.stdout and "continuous / static" in result.stdout


def test_without_prefix_caching_the_continuous_engine_has_another_name(jobs):
    result = invoke("bench", "--synthetic", 3, "--no-enable-prefix-caching")
    assert result.exit_code == 0
    assert [(job.engine, job.name) for job in jobs] == [("continuous", "unshared"), ("static", "static")]
    assert set(json.loads(result.stdout.splitlines()[-1])["ratios"]) == {"unshared_over_static"}


def test_one_engine_has_nothing_to_be_compared_with(jobs):
    result = invoke("bench", "--engine", "static", "--synthetic", 3)
    assert result.exit_code == 0
    last = json.loads(result.stdout.splitlines()[-1])
    assert [run["engine"] for run in last["runs"]] == ["static"]
    assert last["ratios"] == {}
    assert last["check"]["done"] is False


def test_engines_that_disagree_end_with_status_1(monkeypatch):
    def child(job):
        return pretended(job, wrong=("1",) if job.engine == "static" else ())

    monkeypatch.setattr(compare, "run_in_child", child)
    result = invoke("bench", "--synthetic", 3)
    assert result.exit_code == 1
    assert "token ids differ between engines: request '1' differs at output token" in result.stdout
    assert "(continuous and static)" in result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["check"]["difference"] is not None
    assert invoke("bench", "--synthetic", 3, "--no-check").exit_code == 0


def test_a_partial_run_ends_with_status_1(monkeypatch):
    monkeypatch.setattr(compare, "run_in_child", lambda job: pretended(job, failed=("0", "2")))
    result = invoke("bench", "--synthetic", 3)
    assert result.exit_code == 1
    assert "continuous: 2 of 3 requests failed" in result.stdout
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["ratios"] == {}
    assert last["complete"] is False


def test_runs_of_different_work_are_not_put_side_by_side():
    one = pretended(BenchJob("continuous", "m", WorkloadSpec(count=2, seed=1)))
    two = pretended(BenchJob("static", "m", WorkloadSpec(count=2, seed=2)))
    with pytest.raises(ValueError, match="did not run the same workload"):
        make_report([one, two], check=True)


def test_jobs_and_outcomes_travel_as_json():
    job = BenchJob("static", "m", WorkloadSpec(count=2, prompt_tokens=(3, 4)), {"page_size": 4}, threads=2)
    assert json.loads(json.dumps(BenchJob.from_json(json_of(job)).config)) == {"page_size": 4}
    assert BenchJob.from_json(json_of(job)).workload.make(VOCAB) == job.workload.make(VOCAB)
    outcome = pretended(job)
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


def json_of(job):
    return json.loads(json.dumps(asdict(job)))


def test_a_workload_for_another_model_is_refused(tmp_path):
    path = tmp_path / "mix.json"
    row = {"id": 0, "arrival_s": 0, "prompt_token_ids": [1, VOCAB], "max_tokens": 1}
    path.write_text(json.dumps({"requests": [row]}))
    with pytest.raises(ValueError, match=r"token id 500 lies outside the model's vocabulary of 500"):
        WorkloadSpec(path=str(path)).make(VOCAB)


def test_a_child_that_fails_is_an_error_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    job = BenchJob("static", str(tmp_path / "no-such-model"), WorkloadSpec(count=1))
    with pytest.raises(compare.ChildFailed, match="static engine ended with exit status 2"):
        run_in_child(job)
    assert list(tmp_path.iterdir()) == []


def test_no_plugin_error_where_there_is_no_card(monkeypatch, tmp_path):
    monkeypatch.setattr(startup.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(startup, "NVIDIA_DEVICE", tmp_path / "none")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    startup.quiet_start()
    assert os.environ["JAX_PLATFORMS"] == "cuda"  # somebody chose
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(startup, "NVIDIA_DEVICE", tmp_path)
    startup.quiet_start()
    assert "JAX_PLATFORMS" not in os.environ  # there is a card
    monkeypatch.setattr(startup, "NVIDIA_DEVICE", tmp_path / "none")
    monkeypatch.setattr(startup.importlib.util, "find_spec", lambda name: None)
    startup.quiet_start()
    assert "JAX_PLATFORMS" not in os.environ  # there is no plugin
    monkeypatch.setattr(startup.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("JAX_PLATFORMS", "")  # so that monkeypatch puts back what was there
    monkeypatch.delenv("JAX_PLATFORMS")
    startup.quiet_start()
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_threads_are_cores(tmp_path):
    code = "import os, jpaged.startup as s; s.use_cores(1); print(len(os.sched_getaffinity(0)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "1\n"
    with pytest.raises(ValueError, match=r"--threads 100000: this process may run on \d+ core"):
        startup.use_cores(100000)


def test_convert_passes_its_arguments_on(monkeypatch, tmp_path):
    import jpaged.models.convert as loading

    seen = []
    monkeypatch.setattr(loading, "convert", lambda *arguments: seen.append(arguments) or arguments[1])
    result = invoke("convert", "some-model", tmp_path / "out", "--dtype", "bfloat16")
    assert result.exit_code == 0
    assert seen == [("some-model", tmp_path / "out", "bfloat16")]
    assert f"wrote {tmp_path / 'out'}" in result.output


def test_version_names_the_device():
    result = invoke("version")
    assert result.exit_code == 0
    assert result.output.startswith("jpaged ")
    assert "jax 0." in result.output
    option = invoke("--version")  # as every program has it; starts no JAX
    assert option.exit_code == 0 and option.output == result.output.splitlines()[0] + "\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_streamed_answers_are_shown_whole(terminal):
    events = [
        SimpleNamespace(index=1, delta_text="It [bold] is ", finished=False),
        SimpleNamespace(index=0, delta_text="Paris.", finished=True),
        SimpleNamespace(index=1, delta_text="wet.", finished=True),
    ]
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    show_stream(console, ["Capital?", "Sea?"], iter(events))
    shown = console.file.getvalue()
    for text in ("Capital?", "Sea?", "Paris.", "It [bold] is wet."):
        assert text in shown


def test_the_bar_of_an_engine_does_not_count_compiling():
    """Catches: a time beside the demo's bar that is longer than the one in its table."""
    from rich.progress import Progress

    from jpaged.demo import _shown_in

    now = 0.0
    with Progress(console=Console(file=io.StringIO()), get_time=lambda: now, auto_refresh=False) as bars:
        shown = _shown_in(bars, "static")
        (task,) = bars.tasks
        now = 60.0  # compiling
        assert task.elapsed is None
        with shown["bar"]("static", 10) as bar:
            now = 63.0
            bar.update(10)
        assert task.elapsed == 3.0 and task.finished
