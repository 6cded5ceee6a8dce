"""Compiles the engine's step for H200s, without one, with the shapes of real models, and prints what came of it.

    python tests/gpu/aot_step.py             all models
    python tests/gpu/aot_step.py llama-8b    one
    python tests/gpu/aot_step.py llama-8b-2  the same with two layers, which copy and loop as all of them do
    python tests/gpu/aot_step.py scheduling  the step of `jpaged.bench.scheduling`, without a model
    python tests/gpu/aot_step.py --write     all, recorded for this JAX in tests/gpu/step.json

Run by `tests/contract/test_compiled_step.py` in a process that has XLA's CUDA plugin on its path, and compared with
what is recorded; the last line of the output is JSON. Nothing is allocated: parameters and state are shapes.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))  # support
sys.path.insert(0, str(Path(__file__).parents[2]))  # the project

import jax
import jax.numpy as jnp
from support.gpu_aot import compile_for, mesh
from support.record import record
from support.shapes import LLAMA_8B, LLAMA_70B, QWEN_HALF_B

from jpaged.bench.hlo import report
from jpaged.bench.scheduling import Sizes
from jpaged.config import EngineConfig
from jpaged.models.decoder import abstract_decoder
from jpaged.models.spec import ModelConfig
from jpaged.parallel.rules import TENSOR, parameter_shardings, state_shardings
from jpaged.step import demand, exchange, make_state, run, step

ROWS = 64
RECORD = Path(__file__).with_name("step.json")


@dataclass(frozen=True)
class Program:
    """A step, or with `steps` a burst, of `cards` cards whose pool has `pages` pages of 16 tokens."""

    model: ModelConfig
    pages: int
    budget: int
    steps: int | None = None
    cards: int = 1


def _of_two_layers(programs: list[Program]) -> list[Program]:
    return [replace(program, model=replace(program.model, num_layers=2)) for program in programs]


# The pool of an 80 GB card at 0.9 with Llama 3.1 8B has 426,784 tokens.
_MODELS = {
    "llama-8b": [
        Program(LLAMA_8B, 26_674, 256), Program(LLAMA_8B, 26_674 // 2, 256), Program(LLAMA_8B, 26_674, 64, steps=8)
    ],
    "qwen-0.5b": [Program(QWEN_HALF_B, 100_000, 256), Program(QWEN_HALF_B, 100_000, 64, steps=8)],
    "llama-70b": [Program(LLAMA_70B, 100_000, 64, steps=8, cards=8)],
}  # fmt: skip
PROGRAMS: dict[str, list] = {
    **_MODELS,
    **{f"{name}-2": _of_two_layers(programs) for name, programs in _MODELS.items()},
    "scheduling": [Sizes(256, 4096, 30_000)],
}


def measure(program: Program) -> dict:
    model = program.model
    decoder, params = abstract_decoder(model, jnp.bfloat16)
    config = EngineConfig(
        max_queue=64, page_size=16, num_pages=program.pages, max_num_seqs=ROWS, max_num_batched_tokens=program.budget,
        max_model_len=8192,
    )  # fmt: skip
    state = jax.eval_shape(
        lambda: make_state(
            config, layers=model.num_layers, kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype=jnp.bfloat16
        )
    )
    cards = mesh("h200", program.cards, TENSOR)
    shardings = parameter_shardings(cards, params), state_shardings(cards, state)

    def function(params, state):
        if program.steps is None:
            return step(decoder, params, state, budget=program.budget)
        return run(decoder, params, state, budget=program.budget, steps=program.steps)

    # What comes out is laid out as what went in: the next call donates it.
    out = jax.tree.map(lambda _: None, jax.eval_shape(function, params, state))
    out = shardings[1] if program.steps is None else (shardings[1], *out[1:])
    compiled = compile_for(cards, function, params, state, shardings=shardings, donate_argnums=1, out_shardings=out)
    pool = state.pool.k
    layers, heads = pool.shape[0], pool.shape[2] // program.cards
    weights = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(params)) // program.cards
    text = compiled.as_text()
    return report(compiled, (layers, pool.shape[1], heads, *pool.shape[3:])) | {
        "cards": program.cards,
        "pages": program.pages,
        "budget": program.budget,
        "steps": program.steps,
        "layers": model.num_layers,
        "pool_bytes": 2 * pool.size * pool.dtype.itemsize // program.cards,
        "weight_bytes": weights,
        "layer_weight_bytes": weights // model.num_layers,
        "logits_bytes": min(program.budget, ROWS) * model.vocab_size * 4,
        "attention_kernels": text.count('custom_call_target="mosaic_gpu'),
        "all_reduces": text.count(" all-reduce("),
    }


def measure_scheduling(sizes: Sizes) -> dict:
    card, state = mesh("h200"), jax.eval_shape(sizes.state)
    with_host_pool = jax.eval_shape(partial(sizes.state, swap_space_bytes=1 << 18))
    programs = {
        "step": compile_for(card, sizes.step, state, donate_argnums=0), "demand": compile_for(card, demand, state),
        "exchange": compile_for(card, partial(exchange, ahead=8), with_host_pool, donate_argnums=0),
    }  # fmt: skip
    return asdict(sizes) | {name: report(program, state.pool.k.shape) for name, program in programs.items()}


def main() -> None:
    names = [name for name in sys.argv[1:] if not name.startswith("--")] or list(PROGRAMS)
    results = []
    for name in names:
        for program in PROGRAMS[name]:
            found = measure_scheduling(program) if isinstance(program, Sizes) else measure(program)
            results.append({"model": name} | found)
    if "--write" in sys.argv:
        record(RECORD, results)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
