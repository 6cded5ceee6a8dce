"""Compiles attention in XLA operations for cards without a kernel, and prints what came of it as JSON.

    python tests/gpu/aot_xla.py

A T4, which is older than the kernels, and an H200 on which the XLA operations are asked for. Needs XLA's CUDA plugin.
`tests/kernels/test_mosaic_gpu_compiled.py` runs it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))  # support
sys.path.insert(0, str(Path(__file__).parents[2]))  # the project

import jax
import jax.numpy as jnp
from support.gpu_aot import compile_for, mesh

from jpaged.bench.hlo import report
from pallas_kernels import paged_attention
from pallas_kernels.paged_attention.cases import BENCHMARKS


def measure(card: str, name: str, implementation: str, max_pages: int, **changes) -> dict:
    """A benchmark case whose page table has `max_pages` columns: what the compiled program has."""
    case = replace(BENCHMARKS[name], **changes)
    rows = len(case.rows)
    pool = jax.ShapeDtypeStruct((4, 2000, case.kv_heads, case.page_size, case.head_dim), jnp.float16)
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (rows, max_pages), (rows + 1,), (rows,))]
    queries = jax.ShapeDtypeStruct((case.num_tokens, case.heads, case.head_dim), jnp.float16)
    attend = partial(paged_attention, **case.options, implementation=implementation)
    found = report(compile_for(mesh(card), attend, queries, pool, pool, *integers), pool.shape)
    return {"card": card, "case": name, "max_pages": max_pages} | found


def main() -> None:
    found = [
        measure("t4", "serve-decode", "auto", 256), measure("t4", "serve-decode", "auto", 512),
        measure("t4", "serve-mixed", "auto", 256), measure("h200", "serve-mixed", "xla", 256),
        measure("t4", "serve-mixed", "auto", 256, sliding_window=700),
    ]  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
