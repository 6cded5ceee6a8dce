"""One engine, one workload, in this process: build, warm up, run, measure.

`bench.child` does this in a process of its own, where peak memory means something; the demo and the notebooks
do it for two engines in turn on the same weights, and leave peak memory out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

import jax
from jpaged.baseline.static import StaticEngine
from jpaged.engine import Engine

from jpaged.bench.compare import Outcome
from jpaged.bench.measure import EngineAdapter, peak_rss_bytes
from jpaged.bench.products import break_down
from jpaged.bench.report import RunResult
from jpaged.bench.workload import Workload
from jpaged.config import EngineConfig


def fit_config(config: EngineConfig, workload: Workload) -> EngineConfig:
    """`config` with a `max_model_len`: where it has none, that of the longest request, in whole pages.

    It is what static batching reserves for each request, so it is no longer than the work demands.

    Raises:
        ValueError: the workload has a longer request than `config` allows.
    """
    longest = workload.max_request_tokens
    if config.max_model_len is None:
        pages = -(-longest // config.page_size)
        return replace(config, max_model_len=pages * config.page_size)
    if longest > config.max_model_len:
        raise ValueError(
            f"{workload.name}: its longest request has {longest} tokens, max_model_len is "
            f"{config.max_model_len}"
        )
    return config


def make_engine(kind: str, loaded: Any, config: EngineConfig, *, rows: int) -> EngineAdapter:
    """The continuous engine, or the static baseline with `rows` rows.

    Args:
        loaded: has `decoder`, `params` and `model_config`.
    """
    model = (loaded.decoder, loaded.params, loaded.model_config)
    if kind == "continuous":
        return EngineAdapter(kind, Engine(*model, config), page_size=config.page_size)
    if kind == "static":
        engine = StaticEngine(*model, batch_size=rows, max_model_len=config.max_model_len, dtype=config.dtype)
        return EngineAdapter(kind, engine, page_size=engine.page_size)
    raise ValueError(f"engine must be 'continuous' or 'static', got {kind!r}")


def run_engine(
    kind: str,
    loaded: Any,
    workload: Workload,
    config: EngineConfig,
    *,
    model: str,
    batch_size: int | None = None,
    own_process: bool = False,
    breakdown: bool = False,
    say: Callable[[str], None] = lambda text: None,
    bar: Callable[[str, int], AbstractContextManager[Any]] | None = None,
) -> Outcome:
    """Builds an engine, compiles all its programs, runs the workload, and reports what was measured.

    Args:
        kind: "continuous" or "static".
        loaded: has `decoder`, `params` and `model_config`.
        config: see `fit_config` for its `max_model_len`.
        model: the name that the report gives the model.
        batch_size: rows of the static engine; None: `max_num_seqs`.
        own_process: nothing else has run in this process, so its peak memory is the engine's.
        breakdown: also time the products with the weights, after the run.
        say: gets a line of text when something that takes a while begins.
        bar: given a name and the number of tokens to come, a context whose value has `update(tokens)`.
    """
    config = fit_config(config, workload)
    rows = batch_size if kind == "static" and batch_size is not None else config.max_num_seqs
    engine = make_engine(kind, loaded, config, rows=rows)
    say(f"{kind}: compiling")
    engine.warmup()
    with (bar or _no_bar)(kind, workload.output_tokens) as progress:
        measured = engine.run(workload, progress=None if progress is None else progress.update)
    peak = peak_rss_bytes() if own_process else None  # before the breakdown makes weights of its own
    found = None
    if breakdown:
        say(f"{kind}: timing the products with the weights")
        found = break_down(
            measured.history,
            wall_s=measured.wall_s,
            model=loaded.model_config,
            dtype=config.dtype,
            rows=rows,
        ).to_json()
    result = RunResult.of(
        measured,
        engine=kind,
        model=model,
        prompt_tokens=workload.prompt_tokens,
        peak_rss_bytes=peak,
        device=jax.devices()[0].device_kind,
        jax_version=jax.__version__,
        config={**asdict(config), "rows": rows},
        breakdown=found,
    )
    return Outcome(workload.summary(), result, measured)


@contextlib.contextmanager
def _no_bar(name: str, total: int):
    yield None
