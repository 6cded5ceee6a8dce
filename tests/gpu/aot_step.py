"""Compiles the engine's step for an H200, without one, with the shapes of Llama 3.1 8B, and prints what came of it.

Run by `tests/contract/test_compiled_step.py` in a process that has XLA's CUDA plugin on its path; the last line of
the output is JSON. Nothing is allocated: parameters and state are shapes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))  # support
sys.path.insert(0, str(Path(__file__).parents[2]))  # the project

import jax
import jax.numpy as jnp
from support.gpu_aot import compile_for, h200
from support.hlo import report
from support.shapes import LLAMA_8B

from jpaged.config import EngineConfig
from jpaged.models.llama import abstract_decoder
from jpaged.step import make_state, run, step

ROWS, PAGES = 64, 26_674  # the pool of an 80 GB card at 0.9: 426,784 tokens


def measure(mesh, pages: int, budget: int, steps: int | None = None) -> dict:
    decoder, params = abstract_decoder(LLAMA_8B, jnp.bfloat16, stacked=True)
    config = EngineConfig(
        page_size=16, num_pages=pages, max_num_seqs=ROWS, max_num_batched_tokens=budget, max_model_len=8192
    )
    state = jax.eval_shape(
        lambda: make_state(
            config,
            layers=LLAMA_8B.num_layers,
            kv_heads=LLAMA_8B.num_kv_heads,
            head_dim=LLAMA_8B.head_dim,
            dtype=jnp.bfloat16,
        )
    )

    def function(params, state):
        if steps is None:
            return step(decoder, params, state, budget=budget)
        return run(decoder, params, state, budget=budget, steps=steps)

    compiled = compile_for(mesh, function, params, state, donate_argnums=1)
    pool = state.pool
    layer_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(params["layers"])) // LLAMA_8B.num_layers
    return report(compiled, pool.k.shape) | {
        "pages": pages,
        "budget": budget,
        "steps": steps,
        "pool_bytes": sum(a.size * a.dtype.itemsize for a in (pool.k, pool.v)),
        "layer_bytes": layer_bytes,
        "logits_bytes": min(budget, ROWS) * LLAMA_8B.vocab_size * 4,
        "layers": LLAMA_8B.num_layers,
    }


def main() -> None:
    mesh = h200()
    programs = [measure(mesh, PAGES, 256), measure(mesh, PAGES // 2, 256), measure(mesh, PAGES, 64, steps=8)]
    print(json.dumps(programs))


if __name__ == "__main__":
    main()
