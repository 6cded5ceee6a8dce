"""Compiles the paged-attention kernel for cards that are not here, and reads the assembler's report.

    python tests/gpu/aot_kernels.py            prints it, and the least time that cards need for the benchmark cases
    python tests/gpu/aot_kernels.py --write    and records what this JAX makes of it in tests/gpu/kernels.json

Needs JAX 0.11 and XLA's CUDA plugin. `tests/kernels/test_mosaic_gpu_compiled.py` runs it, and compares.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))  # support
sys.path.insert(0, str(Path(__file__).parents[2]))  # the project

import jax
import jax.numpy as jnp
from support.gpu_aot import compile_for, mesh
from support.record import record

from pallas_kernels import paged_attention
from pallas_kernels.cards import CARDS, Card
from pallas_kernels.paged_attention.cases import BENCHMARKS, Case
from pallas_kernels.paged_attention.mosaic_gpu import NEEDS_JAX, card_for
from pallas_kernels.paged_attention.tuning import kind_of, shared_bytes, tuning_for

RECORD = Path(__file__).with_name("kernels.json")


def classes() -> list[tuple[str, Case, str, str]]:
    """(name, case, dtype, card) of every class of shapes: each compiles to a kernel of its own. An H100 has as many
    cores as an H200, and gets the same kernels."""
    cards = [card for card in ("a100", "h200", "b200") if jax.__version_info__ >= NEEDS_JAX[CARDS[card].architecture]]
    return [what for card in cards for kind in ("decode", "mixed") for what in _classes(card, kind)]


def _classes(card: str, kind: str) -> list[tuple[str, Case, str, str]]:
    case = BENCHMARKS[f"serve-{kind}"]
    changes: dict[str, dict] = {"": {}}
    changes |= {f"-head_dim{d}": {"head_dim": d} for d in (64, 80, 96, 112, 192, 256)}
    changes |= {f"-ratio{r}": {"heads": 8 * r} for r in (1, 7, 16)}
    changes |= {f"-page{p}": {"page_size": p} for p in (1, 4, 24, 256)}
    if jax.__version_info__ >= NEEDS_JAX["sm_80"]:  # rows are copied as on Ampere
        changes["-head_dim80-page3"] = {"head_dim": 80, "page_size": 3}
    changes["-window-cap"] = {"sliding_window": 100, "soft_cap": 50.0}
    found = [(f"{card}-{kind}{name}", replace(case, **change), "bfloat16", card) for name, change in changes.items()]
    return [*found, (f"{card}-{kind}-float16", case, "float16", card)]


def compile_class(case: Case, dtype: str, card: str):
    def shape(*sizes, dtype="int32"):
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

    rows = len(case.rows)
    pool = shape(32, 10_000, case.kv_heads, case.page_size, case.head_dim, dtype=dtype)

    def attend(*operands):
        return paged_attention(*operands, **case.options, implementation="mosaic_gpu")

    queries = shape(case.num_tokens, case.heads, case.head_dim, dtype=dtype)
    operands = (queries, pool, pool, shape(), shape(rows, case.max_pages), shape(rows + 1), shape(rows))
    return compile_for(mesh(card), attend, *operands)


def measure() -> dict[str, dict[str, int]]:
    """Of each class: registers a thread, bytes spilled, barriers, bytes of shared memory, bytes of temporaries."""
    every = classes()
    cards = sorted({card for *_, card in every})
    # The assembler writes to the process's own output, and a process that has compiled for one architecture cannot
    # compile for another.
    command = [sys.executable, str(Path(__file__)), "--compile"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    dumping = os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1"}
    processes = [subprocess.Popen([*command, card], env=dumping, **pipes) for card in cards]
    found = {}
    for card, process in zip(cards, processes, strict=True):
        text, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(text[-4000:])
        found |= _read(text, [what for what in every if what[3] == card])
    return found


def _read(text: str, every: list[tuple[str, Case, str, str]]) -> dict[str, dict[str, int]]:
    """The assembler's reports of the classes of one card, in their order, and the bytes of temporaries after them."""
    [temporaries] = [json.loads(line) for line in text.splitlines() if line.startswith("[")]
    spills = [int(a) + int(b) for a, b in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads\n", text)]
    used = re.findall(r"Used (\d+) registers, used (\d+) barriers", text)
    if not len(spills) == len(used) == len(every):
        raise RuntimeError(f"{len(every)} kernels, but {len(spills)} and {len(used)} reports of the assembler")
    return {
        name: {
            "registers": int(registers),
            "spilled_bytes": spilled,
            "barriers": int(barriers),
            "shared_bytes": _shared_bytes(case, CARDS[card]),
            "temporary_bytes": temporary,
        }
        for (name, case, _, card), spilled, (registers, barriers), temporary in zip(
            every, spills, used, temporaries, strict=True
        )
    }


def _shared_bytes(case: Case, card: Card) -> int:
    card = card_for(card, case.page_size, case.head_dim)
    tuning = tuning_for(card, kind_of(case.num_tokens, len(case.rows)), case.head_dim)
    return shared_bytes(tuning, card, case.head_dim)


def limits() -> str:
    """What each benchmark case must move and compute, and the time that takes on each card at least."""
    lines = [f"{'case':<22}{'MB':>9}{'GFLOP':>9}" + "".join(f"{name + ' us':>10}" for name in CARDS)]
    for name, case in BENCHMARKS.items():
        times = "".join(f"{1e6 * case.least_seconds(CARDS[card]):>10.1f}" for card in CARDS)
        lines.append(f"{name:<22}{case.bytes_moved(2) / 1e6:>9.1f}{case.operations / 1e9:>9.2f}{times}")
    return "\n".join(lines)


def main() -> None:
    if "--compile" in sys.argv:
        mine = [what for _, *what in classes() if what[2] == sys.argv[-1]]
        sizes = [compile_class(*what).memory_analysis().temp_size_in_bytes for what in mine]
        print(json.dumps(sizes), flush=True)
        return
    found = measure()
    if "--json" in sys.argv:
        print(json.dumps(found))
        return
    for name, row in found.items():
        print(f"{name:<20}" + "".join(f"{value:>12,} {key}" for key, value in row.items()))
    print(limits())
    if "--write" in sys.argv:
        record(RECORD, found)


if __name__ == "__main__":
    main()
