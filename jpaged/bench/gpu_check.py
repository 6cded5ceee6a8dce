"""Everything that can only be known on a GPU, measured by one command.

    python -m jpaged.bench.gpu_check --json gpu.json

Needs JAX, flax and numpy. Each section writes what it found into the file before the next begins, and a second run
with the same file goes on where the first stopped; a section that took the process down is not tried again. The
table comes last, and after it the results as one line of JSON. `--small` rehearses all of it on any machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.baseline.static import StaticEngine
from jpaged.bench.measure import EngineAdapter, first_difference
from jpaged.bench.workload import synthetic_workload
from jpaged.config import EngineConfig
from jpaged.models.decoder import abstract_decoder
from jpaged.models.spec import ModelConfig, RopeScaling
from jpaged.request import Request, SamplingParams
from jpaged.runtime.engine import Engine
from pallas_kernels import paged_attention
from pallas_kernels.cards import target_card
from pallas_kernels.paged_attention.cases import BENCHMARKS, CASES, Case, operands
from pallas_kernels.paged_attention.mosaic_gpu import missing
from pallas_kernels.paged_attention.timing import seconds, seconds_of

LLAMA_8B = ModelConfig(
    family="llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=500_000.0, max_position_embeddings=131_072,
    tie_word_embeddings=False, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
)  # fmt: skip
SMOLLM2_135M = ModelConfig(
    family="llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, rms_norm_eps=1e-5, rope_theta=100_000.0, max_position_embeddings=8192,
    tie_word_embeddings=True,
)  # fmt: skip
SMALL = replace(SMOLLM2_135M, vocab_size=256, hidden_size=48, intermediate_size=64, num_layers=2, head_dim=16)


@dataclass(frozen=True)
class Sizes:
    """How large the sections are: those of a card, or `small`, with which all of them are rehearsed."""

    small: bool

    @property
    def copy_bytes(self) -> int:
        return 1 << 22 if self.small else 4 << 30

    @property
    def product(self) -> int:
        return 256 if self.small else 8192

    def cases(self) -> dict[str, Case]:
        """Those of the core first: together they take every path of the kernels."""
        if self.small:
            return {name: CASES[name] for name in ("mixed-page16", "long-decode")}
        return {name: CASES[name] for name in sorted(CASES, key=lambda name: not CASES[name].core)}

    @property
    def cases_s(self) -> float:
        """Seconds after which no further case is begun."""
        return 150.0

    def benchmarks(self, kind: str) -> dict[str, Case]:
        """The benchmark cases whose names begin so."""
        if self.small:
            return {kind: Case(kind, ((1, 70),) * 3, heads=4, kv_heads=2, head_dim=64)}
        return {name: case for name, case in BENCHMARKS.items() if name.startswith(kind)}


# -- sections: (what is known so far, sizes) -> what was found


def ceilings(found: dict, sizes: Sizes) -> dict:
    """What the card reaches where nothing else is to do: a copy, and a large product in bfloat16."""
    data = jnp.zeros(sizes.copy_bytes // 2, jnp.bfloat16)
    copy = jax.jit(lambda a: a + jnp.bfloat16(1))
    n = sizes.product
    matrix = jnp.ones((n, n), jnp.bfloat16)
    multiply = jax.jit(lambda a: jnp.matmul(a, a))
    return {
        "copy_bytes_per_s": 2 * data.nbytes / seconds(lambda: copy(data)),
        "flops_per_s": 2 * n**3 / seconds(lambda: multiply(matrix)),
    }


def every_case(found: dict, sizes: Sizes) -> dict:
    """Each case of the kernels against the specification in float32, poison and all; relative to its norm. Cases
    that there was no time for are listed."""
    errors: dict[str, float] = {}
    skipped: dict[str, str] = {}
    wrong: dict[str, float] = {}
    not_run: list[str] = []
    began = time.perf_counter()
    for name, case in sizes.cases().items():
        if time.perf_counter() - began > sizes.cases_s:
            not_run.append(name)
            continue
        arguments = operands(case, dtype=jnp.bfloat16)
        why = missing(*arguments[:2])
        if why is not None and not sizes.small:
            skipped[name] = why
            continue
        attend = jax.jit(partial(paged_attention, **case.options))
        exact = tuple(a.astype(jnp.float32) for a in arguments[:3])
        specified = jax.jit(partial(paged_attention, **case.options, implementation="reference"))
        result = np.asarray(attend(*arguments), np.float64)
        expected = np.asarray(specified(*exact, *arguments[3:]), np.float64)
        error = float(np.linalg.norm(result - expected)) / max(float(np.linalg.norm(expected)), 1e-30)
        errors[name] = error
        if not error < 1e-2:
            wrong[name] = error
    return {
        "cases": len(errors), "largest_error": max(errors.values()), "wrong": wrong, "skipped": skipped,
        "not_run": not_run,
    }  # fmt: skip


def decode_attention(found: dict, sizes: Sizes) -> dict:
    """Decoding, as a share of the copy's bandwidth."""
    ceiling = found["ceilings"]["copy_bytes_per_s"]
    shares = {}
    for name, case in sizes.benchmarks("decode-").items():
        taken = seconds_of(case, paged_attention)
        shares[name] = {"us": 1e6 * taken, "share_of_copy": case.bytes_moved(2) / taken / ceiling}
    return shares


def prefill_attention(found: dict, sizes: Sizes) -> dict:
    """Prefill and mixed batches, as a share of the product's operations."""
    ceiling = found["ceilings"]["flops_per_s"]
    shares = {}
    for name, case in sizes.benchmarks("serve-").items():
        taken = seconds_of(case, paged_attention)
        shares[name] = {"us": 1e6 * taken, "share_of_product": case.operations / taken / ceiling}
    return shares


def others(found: dict, sizes: Sizes) -> dict:
    """The same decoding by XLA's operations, JAX's own paged op, and torch over contiguous keys, where they are."""
    (name, case), *_ = sizes.benchmarks("decode-64x2048").items()
    results: dict[str, Any] = {"case": name, "ours_us": 1e6 * seconds_of(case, paged_attention)}
    measures: dict[str, Callable[[], float]] = {
        "xla": partial(seconds_of, case, partial(paged_attention, implementation="xla")),
        "jax_paged_op": partial(_jax_op, case), "torch_sdpa": partial(_torch, case),
    }  # fmt: skip
    for label, measure in measures.items():
        try:
            results[f"{label}_us"] = 1e6 * measure()
        except Exception as error:  # whatever another project's operation raises here is what there is to say of it
            results[label] = f"not measured: {type(error).__name__}: {str(error)[:200]}"
    return results


def _jax_op(case: Case) -> float:
    """JAX's op takes `[kv_heads, pages, page_size, head_dim]`, one layer, decoding only."""
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")
    pages, rows = case.pages_used, len(case.rows)
    k = jnp.ones((case.kv_heads, pages, case.page_size, case.head_dim), jnp.bfloat16)
    queries = jnp.ones((rows, case.heads, case.head_dim), jnp.bfloat16)
    table = jnp.arange(pages, dtype=jnp.int32).reshape(rows, -1)
    lengths = jnp.asarray([tokens for _, tokens in case.rows], jnp.int32)
    attend = jax.jit(module.paged_attention)
    return seconds(lambda: attend(queries, k, k, table, lengths))


def _torch(case: Case) -> float:
    torch = importlib.import_module("torch")
    batch, context = len(case.rows), case.rows[0][1]
    sizes = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.ones(batch, case.heads, 1, case.head_dim, **sizes)
    k = torch.ones(batch, case.kv_heads, context, case.head_dim, **sizes)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, q, k, k, enable_gqa=True)
    for _ in range(3):
        attend()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        attend()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 20


def _random_model(model: ModelConfig, dtype: Any) -> tuple[Any, Any]:
    """A decoder and random weights of `model`, made on the device, small enough that nothing overflows."""
    decoder, shapes = abstract_decoder(model, dtype)
    leaves, tree = jax.tree.flatten(shapes)

    @partial(jax.jit, static_argnums=1)
    def weight(key, shape):
        return 0.02 * jax.random.normal(key, shape, dtype)

    numbers = iter(range(model.num_layers))
    made = [
        weight(jax.random.key(i), leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        else jnp.full(leaf.shape, next(numbers), leaf.dtype)
        for i, leaf in enumerate(leaves)
    ]
    return decoder, jax.tree.unflatten(tree, made)


def engine_steps(found: dict, sizes: Sizes) -> dict:
    """Llama 3.1 8B with random weights: steps that decode, a step of a prefill, and the host's time between bursts,
    against the least time: weights and keys read once at the copy's bandwidth, operations at the product's."""
    model, rows, context, budget = (SMALL, 2, 64, 32) if sizes.small else (LLAMA_8B, 64, 1024, 2048)
    dtype = jnp.bfloat16
    decoder, params = _random_model(model, dtype)
    config = EngineConfig(
        page_size=16, num_pages=rows * (context + 256) // 16, max_num_seqs=rows, max_num_batched_tokens=budget,
        token_budgets=(rows, budget), max_model_len=context + 256, dtype="bfloat16", steps_per_burst=8,
    )  # fmt: skip
    engine = Engine(decoder, params, model, config)
    engine.warmup()
    rng = np.random.default_rng(0)
    limit = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    for i in range(rows):
        prompt = rng.integers(0, model.vocab_size, context - context // 8).tolist()
        engine.submit(Request(str(i), tuple(prompt), limit))
    prefill: list[float] = []  # seconds of steps that compute as much as they may
    bursts: list[float] = []  # seconds of bursts that decode in all rows
    while engine.has_work and len(bursts) < 10:
        before, start = engine.stats(), time.perf_counter()
        engine.burst()
        taken, after = time.perf_counter() - start, engine.stats()
        tokens, steps = after.useful_row_steps - before.useful_row_steps, after.steps - before.steps
        if tokens == budget * steps:
            prefill.append(taken / steps)
        if tokens == rows * steps and steps == 8:
            bursts.append(taken)
    device = _device_seconds(engine.program(rows), params, engine.state)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    embedding = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size * 2  # rows of it are read
    kv = rows * context * 2 * model.num_layers * model.num_kv_heads * model.head_dim * 2
    least = (weights - embedding + kv) / found["ceilings"]["copy_bytes_per_s"]
    work = 2 * budget * (weights - 2 * embedding) / 2 / found["ceilings"]["flops_per_s"]
    burst_s, prefill_s = float(np.median(bursts)), float(np.median(prefill))
    step_s = burst_s / 8
    return {
        "compile_s": engine.compile_seconds, "decode_step_ms": 1e3 * step_s, "decode_least_ms": 1e3 * least,
        "decode_over_least": step_s / least, "prefill_step_ms": 1e3 * prefill_s, "prefill_least_ms": 1e3 * work,
        "prefill_over_least": prefill_s / work, "burst_ms": 1e3 * burst_s, "device_ms_a_burst": 1e3 * device,
        "host_ms_between_bursts": 1e3 * (burst_s - device),
    }  # fmt: skip


def _device_seconds(program: Any, params: Any, state: Any, calls: int = 5) -> float:
    """Seconds of one burst, called several times over without the host reading what comes out. `state` is used up."""
    start = time.perf_counter()
    for _ in range(calls):
        state = program(params, state)[0]
    jax.block_until_ready(state)
    return (time.perf_counter() - start) / calls


def continuous_against_static(found: dict, sizes: Sizes) -> dict:
    """The engine and the static baseline on one workload, with the shapes of SmolLM2 135M and random weights."""
    model, count, rows, budget = (SMALL, 6, 2, 32) if sizes.small else (SMOLLM2_135M, 256, 64, 1024)
    decoder, params = _random_model(model, jnp.bfloat16)
    lengths: dict[str, Any] = {"prompt_tokens": (4, 20), "output_tokens": (2, 8)} if sizes.small else {}
    workload = synthetic_workload(count, seed=0, token_ids=(0, model.vocab_size - 1), **lengths)
    longest = -(-workload.max_request_tokens // 64) * 64
    config = EngineConfig(
        num_pages=rows * longest // 16, max_num_seqs=rows, max_model_len=longest, dtype="bfloat16",
        max_num_batched_tokens=budget, token_budgets=(rows, budget),
    )  # fmt: skip
    engines: dict[str, tuple[Any, int]] = {
        "continuous": (Engine(decoder, params, model, config), 16),
        "static": (StaticEngine(decoder, params, model, batch_size=rows, max_model_len=longest, dtype="bfloat16"), 64),
    }
    results: dict[str, Any] = {"workload_sha256": workload.sha256, "rows": rows}
    measured = {}
    for name, (engine, page_size) in engines.items():
        adapter = EngineAdapter(name, engine, page_size=page_size)
        adapter.warmup(workload)
        measured[name] = run = adapter.run(workload)
        if run.failures:
            raise RuntimeError(f"{name}: {len(run.failures)} requests failed: {next(iter(run.failures.items()))}")
        results[f"{name}_tokens_per_s"] = workload.output_tokens / run.wall_s
        results[f"{name}_compile_s"] = run.compile_s
    results["ratio"] = results["continuous_tokens_per_s"] / results["static_tokens_per_s"]
    # In bfloat16 a token may differ where two logits are near; it is said, and no failure.
    results["first_difference"] = first_difference(measured["continuous"], measured["static"])
    return results


SECTIONS: dict[str, Callable[[dict, Sizes], dict]] = {
    "ceilings": ceilings, "every_case": every_case, "decode_attention": decode_attention,
    "prefill_attention": prefill_attention, "engine_steps": engine_steps,
    "continuous_against_static": continuous_against_static, "others": others,
}  # fmt: skip


def run(path: Path, *, small: bool = False, limit_s: float = 460, say: Callable[[str], None] = print) -> dict:
    """Runs the sections that the file does not have yet, until `limit_s` seconds have passed.

    Raises:
        ValueError: the file holds results of another device, JAX or size.
    """
    device, card = jax.devices()[0], target_card()
    machine = {
        "device": device.device_kind, "card": None if card is None else card.name,
        "compute_capability": getattr(device, "compute_capability", None),
        "python": platform.python_version(), "jax": jax.__version__, "jaxlib": version("jaxlib"),
        "backend": device.client.platform_version.splitlines()[0], "small": small,
    }  # fmt: skip
    found = json.loads(path.read_text()) if path.exists() else {"machine": machine}
    if found["machine"] != machine:
        raise ValueError(f"{path} holds results of {found['machine']}, and this is {machine}; give another --json")

    def keep(name: str, result: dict) -> None:
        found[name] = result
        path.write_text(json.dumps(found, indent=1))

    began = time.perf_counter()
    for name, section in SECTIONS.items():
        if "started" in found.get(name, {}):
            keep(name, {"failed": "the process ended in it"})
        if name in found:
            continue
        if time.perf_counter() - began > limit_s:
            say(f"{name}: no time left; run again with the same file")
            break
        keep(name, {"started": datetime.now(UTC).isoformat(timespec="seconds")})
        start = time.perf_counter()
        try:
            result = section(found, Sizes(small))
        except Exception:  # one section's fault is a result, and does not cost the others theirs
            result = {"failed": traceback.format_exc()[-3000:]}
        seconds_taken = round(time.perf_counter() - start, 1)
        keep(name, {"date": datetime.now(UTC).date().isoformat(), "took_s": seconds_taken} | result)
        say(f"{name}: {'failed' if 'failed' in result else 'done'} in {seconds_taken} s")
    return found


def table(found: dict) -> str:
    """The results in some lines, with what is aimed at."""
    rows: list[tuple[str, str]] = [("card", f"{found['machine']['device']}, JAX {found['machine']['jax']}")]
    failed = [name for name, section in found.items() if "failed" in section]

    def add(section: str, name: str, text: Callable[[dict], str]) -> None:
        if section in found and section not in failed:
            rows.append((name, text(found[section])))

    add(
        "ceilings",
        "copy, product",
        lambda s: f"{s['copy_bytes_per_s'] / 1e9:,.0f} GB/s, {s['flops_per_s'] / 1e12:,.1f} TFLOP/s",
    )
    add(
        "every_case",
        "cases",
        lambda s: f"{s['cases']}, largest error {s['largest_error']:.1e}, wrong: {list(s['wrong'])}",
    )
    for section, share, aim in (
        ("decode_attention", "share_of_copy", 85),
        ("prefill_attention", "share_of_product", 60),
    ):
        for name, case in found.get(section, {}).items() if section not in failed else ():
            if isinstance(case, dict):
                rows.append((name, f"{case['us']:,.0f} us, {100 * case[share]:.0f} % (aim {aim})"))
    add(
        "engine_steps",
        "8B decode step",
        lambda s: f"{s['decode_step_ms']:.2f} ms, {s['decode_over_least']:.2f} x least (aim 1.3)",
    )
    add(
        "engine_steps",
        "8B prefill step",
        lambda s: f"{s['prefill_step_ms']:.1f} ms, {s['prefill_over_least']:.2f} x least",
    )
    add("engine_steps", "host, a burst", lambda s: f"{s['host_ms_between_bursts']:.2f} ms of {s['burst_ms']:.1f}")
    add(
        "continuous_against_static",
        "continuous/static",
        lambda s: f"{s['ratio']:.2f} ({s['continuous_tokens_per_s']:,.0f} tokens/s)",
    )
    add("others", "others", lambda s: ", ".join(f"{k} {v:,.0f}" for k, v in s.items() if k.endswith("_us")))
    rows += [("failed", name) for name in failed]
    missing = [name for name in SECTIONS if name not in found]
    rows += [("not run", name) for name in missing]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="results; a file to go on from")
    parser.add_argument("--limit-s", type=float, default=460, help="no section begins after so many seconds")
    parser.add_argument("--small", action="store_true", help="small sizes, for rehearsing on any machine")
    options = parser.parse_args()
    found = run(options.json, small=options.small, limit_s=options.limit_s)
    print(table(found))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
