"""Real engines under measurement: on a stub whose tokens are known, and as `jpaged bench` on a tiny model."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.checkpoint_files import write_hf
from support.shapes import STUB_MODEL
from support.stubs import ScriptDecoder

from jpaged.bench.compare import make_report
from jpaged.bench.run import fit_config, make_engine, run_engine
from jpaged.bench.workload import Workload, WorkloadRequest, synthetic_workload
from jpaged.config import EngineConfig
from jpaged.runtime.engine import Engine

NAN_TOKEN = 40
STUB = ScriptDecoder(vocab=32, nan_token=NAN_TOKEN)
CONFIG = EngineConfig(
    page_size=4, num_pages=40, max_num_seqs=3, max_num_batched_tokens=8, token_budgets=(8,), max_model_len=24,
    dtype="float32", steps_per_burst=1,
).for_platform("cpu")  # fmt: skip
KINDS = ("continuous", "static")


@pytest.fixture(scope="module")
def loaded():
    """The stub with an engine, which is compiled once for all tests of this file."""
    engine = Engine(STUB, None, STUB_MODEL, CONFIG)
    return SimpleNamespace(decoder=STUB, params=None, model_config=STUB_MODEL, engine=engine)


def mix(count=10):
    return synthetic_workload(count, seed=1, token_ids=(0, 31), prompt_tokens=(1, 12), output_tokens=(1, 12))


def run_both(loaded, workload):
    return [run_engine(kind, loaded, workload, CONFIG, model="stub") for kind in KINDS]


@pytest.fixture(scope="module")
def both(loaded):
    return run_both(loaded, mix())


def expected(request):
    return tuple(STUB.continuation(request.prompt_token_ids, request.max_tokens))


def test_both_engines_give_the_tokens_of_each_request_alone(both):
    workload = mix()
    for outcome in both:
        assert outcome.measured.token_ids == {r.request_id: expected(r) for r in workload.requests}
    report = make_report(both, check=True)
    assert report.problems == []
    assert [run.output_tokens for run in report.runs] == [workload.output_tokens] * 2
    # every token but the last of a request is computed once, whoever computes it: nothing was preempted
    computed = workload.prompt_tokens + workload.output_tokens - len(workload.requests)
    assert [run.useful_row_steps for run in report.runs] == [computed] * 2
    assert [run.compiled_while_measured for run in report.runs] == [0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_history_and_totals_tell_the_same(kind, both):
    measured = both[KINDS.index(kind)].measured
    history = measured.history
    assert len(history) == measured.steps
    assert sum(s.scheduled_tokens for s in history) == measured.useful_row_steps
    assert sum(s.budget for s in history) == measured.useful_row_steps + measured.wasted_row_steps
    for sample in history:
        assert 0 <= sample.tokens_in_pages <= sample.pages_in_use * measured.page_size
        assert sample.pages_in_use <= measured.num_pages


def test_a_shared_prefix_is_computed_once_and_held_once(loaded):
    """Catches: a mode that is named without being in force, and counts of prompts or pages that say otherwise. Each
    of the requests alone would compute its 8 shared tokens and hold them in two pages of its own."""
    workload = synthetic_workload(
        6, seed=1, token_ids=(0, 31), prompt_tokens=(1, 4), output_tokens=(4, 8), shared_prefix=8
    )
    unshared = replace(CONFIG, enable_prefix_caching=False)
    outcomes = [
        run_engine(kind, loaded, workload, config, model="stub")
        for kind, config in (("continuous", CONFIG), ("continuous", unshared), ("static", CONFIG))
    ]
    for outcome in outcomes:
        assert outcome.measured.token_ids == {r.request_id: expected(r) for r in workload.requests}
    report = make_report(outcomes, check=True)
    assert report.problems == []
    assert [run.engine for run in report.runs] == ["continuous", "unshared", "static"]
    assert [run.prompt_tokens_found for run in report.runs] == [5 * 8, 0, 0]
    total = workload.prompt_tokens
    assert [run.prompt_tokens_computed for run in report.runs] == [total - 5 * 8, total, total]
    shared, alone, static = (run.kv_share for run in report.runs)
    # two of the three that run together name the two pages of the first
    assert shared.reserved_pages_peak == alone.reserved_pages_peak - 4
    assert (static.reserved_pages_peak, static.page_size) == (3, 32)


def test_failed_requests_are_the_same_in_both_and_do_not_count(loaded):
    """ME-04 with real engines: a prompt that ends with the stub's NaN token fails, alone."""
    workload = mix()
    broken = {"2", "5", "6"}
    requests = tuple(
        replace(r, prompt_token_ids=(*r.prompt_token_ids, NAN_TOKEN)) if r.request_id in broken else r
        for r in workload.requests
    )
    outcomes = run_both(loaded, Workload("broken", requests))
    for outcome in outcomes:
        run = outcome.result
        assert (run.requests, run.failed_requests, set(run.failures)) == (10, 3, broken)
        assert set(run.failures.values()) == {"ended by error"}
        kept = [r for r in workload.requests if r.request_id not in broken]
        assert run.output_tokens == sum(r.max_tokens for r in kept)
        assert outcome.measured.token_ids == {r.request_id: expected(r) for r in kept}
    assert make_report(outcomes, check=True).ratios == {}


def test_static_batching_reserves_for_the_longest_request(both):
    continuous, static = (outcome.result for outcome in both)
    assert static.kv_share.used_tokens_mean / static.kv_share.reserved_tokens_mean < 0.6
    assert continuous.kv_share.used_tokens_mean / continuous.kv_share.reserved_tokens_mean > 0.6
    assert static.config == {"batch_size": 3, "max_model_len": 24, "dtype": "float32"}


def test_arrivals_are_waited_for(loaded):
    requests = (WorkloadRequest("a", 0.0, (1, 2), 2), WorkloadRequest("b", 0.3, (3,), 2))
    outcome = run_engine("continuous", loaded, Workload("late", requests), CONFIG, model="stub")
    # From its arrival on, however long it takes: what came before is not counted.
    assert 0 < outcome.measured.latency_s["b"] <= outcome.measured.wall_s - 0.3 + 1e-6


def test_the_length_follows_the_workload_unless_it_is_given():
    workload = Workload("one", (WorkloadRequest("0", 0.0, (1,) * 10, 7),))
    assert fit_config(replace(CONFIG, max_model_len=None), workload).max_model_len == 20
    assert fit_config(replace(CONFIG, max_model_len=40), workload).max_model_len == 40
    with pytest.raises(ValueError, match="one: its longest request has 17 tokens, max_model_len is 16"):
        fit_config(replace(CONFIG, max_model_len=16), workload)


def test_an_engine_of_just_this_config_is_used_again(loaded):
    assert replace(CONFIG, dtype="auto").for_platform("cpu") == CONFIG == loaded.engine.config
    assert make_engine("continuous", loaded, CONFIG, rows=3)[0].engine is loaded.engine
    other = make_engine("continuous", loaded, replace(CONFIG, num_pages=30), rows=3)[0].engine
    assert other is not loaded.engine
    with pytest.raises(ValueError, match="'continuous' or 'static', got 'dynamic'"):
        make_engine("dynamic", loaded, CONFIG, rows=3)


def test_the_command_runs_real_engines_in_processes_of_their_own(tmp_path):
    model = write_hf(tmp_path / "model")
    command = [
        sys.executable, "-m", "jpaged.cli", "bench", "--model", model, "--synthetic", 6, "--prompt-tokens", 2, 12,
        "--output-tokens", 2, 10, "--max-num-seqs", 2, "--max-num-batched-tokens", 2, "--num-pages", 20,
        "--threads", 1, "--breakdown", "--json", tmp_path / "report.json", "--plot", tmp_path / "pages.png",
    ]  # fmt: skip
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert report["check"] == {"done": True, "difference": None}
    assert [run["engine"] for run in report["runs"]] == list(KINDS)
    for run in report["runs"]:
        assert run["output_tokens"] == report["workload"]["output_tokens"]
        assert run["threads"] == 1
        assert sum(run["breakdown"]["share"].values()) == pytest.approx(1)
        # heads too small for the attention kernel
        assert all((share > 0) == (name != "attention_kernel") for name, share in run["breakdown"]["share"].items())
        assert sum(run["breakdown"]["steps_by_budget"].values()) == run["steps"]
        assert 50 << 20 < run["peak_rss_bytes"] < 8 << 30
    assert (tmp_path / "pages.png").stat().st_size > 10_000
