"""One engine, one workload, in this process: build, warm up, run, measure.

`bench.child` does this in a process of its own, where peak memory means something; the demo and the notebooks
do it for two engines in turn on the same weights, and leave peak memory out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jpaged.baseline.static import StaticEngine
from jpaged.bench.breakdown import break_down, check_breakdown
from jpaged.bench.compare import Outcome, run_name
from jpaged.bench.measure import EngineAdapter, peak_rss_bytes
from jpaged.bench.report import RunResult
from jpaged.bench.workload import Workload
from jpaged.config import EngineConfig
from jpaged.models.decoder import load_decoder
from jpaged.models.load import load_checkpoint, resolve
from jpaged.models.spec import ModelConfig
from jpaged.runtime.engine import Engine


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
            f"{workload.name}: its longest request has {longest} tokens, max_model_len is {config.max_model_len}"
        )
    return config


class Loaded(Protocol):
    """A model in memory; `jpaged.LLM` is one. `engine`, where there is one, is taken instead of a new engine
    if it has just the config that is asked for: it may be compiled already."""

    @property
    def decoder(self) -> Any: ...
    @property
    def params(self) -> Any: ...
    @property
    def model_config(self) -> ModelConfig: ...


@dataclass(frozen=True)
class Model:
    """Weights and what they mean, without an engine."""

    decoder: Any
    params: Any
    model_config: ModelConfig


def load(name: str, dtype: str) -> Model:
    """The weights of a built-in name, directory, file or hub id, in `dtype`.

    Raises:
        ValueError: there is no such model, or it is not whole.
    """
    checkpoint = load_checkpoint(resolve(name))
    decoder, params = load_decoder(checkpoint.config, checkpoint.parameters(dtype), jnp.dtype(dtype))
    return Model(decoder, params, checkpoint.config)


def make_engine(kind: str, loaded: Loaded, config: EngineConfig, *, rows: int) -> tuple[EngineAdapter, dict[str, Any]]:
    """The continuous engine, or the static baseline with `rows` rows; and the sizes it was made with."""
    model = (loaded.decoder, loaded.params, loaded.model_config)
    if kind == "continuous":
        engine = getattr(loaded, "engine", None)
        if engine is None or engine.config != config:
            engine = Engine(*model, config)
        return EngineAdapter(kind, engine, page_size=config.page_size), engine.config.to_json()
    if kind == "static":
        length = config.max_model_len or loaded.model_config.max_position_embeddings
        static = StaticEngine(*model, batch_size=rows, max_model_len=length, dtype=config.pool_dtype)
        sizes = {"batch_size": rows, "max_model_len": length, "dtype": config.pool_dtype}
        return EngineAdapter(kind, static, page_size=static.page_size), sizes
    raise ValueError(f"engine must be 'continuous' or 'static', got {kind!r}")


def run_engine(
    kind: str,
    loaded: Loaded,
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
        loaded: an LLM, or the weights that `load` gives.
        config: see `fit_config` for its `max_model_len`.
        model: the name that the report gives the model.
        batch_size: rows of the static engine; None: `max_num_seqs`.
        own_process: nothing else has run in this process, so its peak memory is the engine's.
        breakdown: also run the workload again and profile some of its steps; see `break_down`.
        say: gets a line of text when something that takes a while begins.
        bar: given a name and the number of tokens to come, a context whose value has `update(tokens)`.

    Raises:
        ValueError: for sizes that do not fit, or where a breakdown is asked for that cannot be made.
    """
    if breakdown:
        check_breakdown(workload)
    config = fit_config(config.for_platform(jax.default_backend()), workload)
    rows = batch_size if kind == "static" and batch_size is not None else config.max_num_seqs
    adapter, sizes = make_engine(kind, loaded, config, rows=rows)
    name = run_name(kind, enable_prefix_caching=config.enable_prefix_caching)
    say(f"{name}: compiling")
    adapter.warmup(workload, use_tqdm=own_process)
    with (bar or _no_bar)(name, workload.output_tokens) as progress:
        measured = adapter.run(workload, progress=None if progress is None else progress.update)
    peak = peak_rss_bytes() if own_process else None  # before profiles take some
    found = None
    if breakdown and measured.history:  # there is none if every request was refused
        with (bar or _no_bar)(f"{name}, profiled", workload.output_tokens) as progress:
            again = None if progress is None else progress.update
            found = break_down(adapter.engine, workload, measured, progress=again).to_json()
    result = RunResult.of(
        measured,
        engine=name,
        model=model,
        prompt_tokens=workload.prompt_tokens,
        peak_rss_bytes=peak,
        device=jax.devices()[0].device_kind,
        jax_version=jax.__version__,
        config=sizes,
        breakdown=found,
    )
    return Outcome(workload.summary(), result, measured)


@contextlib.contextmanager
def _no_bar(name: str, total: int):
    yield None
