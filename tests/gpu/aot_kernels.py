"""Compiles the paged-attention kernel for cards that are not here, and reads the assembler's report.

    python tests/gpu/aot_kernels.py            prints it, and the least time that cards need for the benchmark cases
    python tests/gpu/aot_kernels.py --core     of one class a card
    python tests/gpu/aot_kernels.py --write    and records what this JAX makes of it in tests/gpu/kernels.json
    python tests/gpu/aot_kernels.py --check    compares it with that record

Needs JAX 0.11 and XLA's CUDA plugin. `tests/kernels/test_mosaic_gpu_compiled.py` runs it, and compares.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))  # support
sys.path.insert(0, str(Path(__file__).parents[2]))  # the project

import jax
import jax.numpy as jnp
from support.gpu_aot import card as described
from support.gpu_aot import compile_for, mesh
from support.record import record, recorded

from pallas_kernels import paged_attention
from pallas_kernels.cards import CARDS, Card
from pallas_kernels.paged_attention.cases import BENCHMARKS, Case
from pallas_kernels.paged_attention.mosaic_gpu import NEEDS_JAX, card_for, needed_jax
from pallas_kernels.paged_attention.tuning import kind_of, shared_bytes, tuning_for

RECORD = Path(__file__).with_name("kernels.json")


#: An H100 has as many cores as an H200, and gets the same kernels. Each of the others stands for its capability.
_ALL_CLASSES, _ONE_SHAPE = ("a100", "h200", "b200"), ("a10", "l4", "rtx5090", "b300")


def classes(*, core: bool = False) -> list[tuple[str, Case, str, str]]:
    """(name, case, dtype, card) of every class of shapes: each compiles to a kernel of its own. `core`: one a card, in
    turn of a decoding and of a mixed batch."""
    cards = [card for card in (*_ALL_CLASSES, *_ONE_SHAPE) if jax.__version_info__ >= needed_jax(described(card))]
    every = [what for card in cards for kind in ("decode", "mixed") for what in _classes(card, kind)]
    if core:
        names = {f"{card}-{('mixed', 'decode')[nth % 2]}" for nth, card in enumerate(cards)}
        return [what for what in every if what[0] in names]
    return every


def _classes(card: str, kind: str) -> list[tuple[str, Case, str, str]]:
    case = BENCHMARKS[f"serve-{kind}"]
    changes: dict[str, dict] = {"": {}}
    if card in _ONE_SHAPE:  # their shared memory, and with it the blocks, is what differs from the others
        changes |= {f"-head_dim{d}": {"head_dim": d} for d in (64, 256)}
        return [(f"{card}-{kind}{name}", replace(case, **change), "bfloat16", card) for name, change in changes.items()]
    changes |= {f"-head_dim{d}": {"head_dim": d} for d in (64, 80, 96, 112, 192, 256)}
    changes |= {f"-ratio{r}": {"heads": 8 * r} for r in (1, 7, 16)}
    changes |= {f"-page{p}": {"page_size": p} for p in (1, 4, 24, 256)}
    if jax.__version_info__ >= NEEDS_JAX["ampere"]:  # rows are copied as on Ampere
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


def measure(*, core: bool = False) -> dict[str, dict[str, int]]:
    """Of each class: registers a thread, bytes spilled, barriers, bytes of shared memory, bytes of temporaries."""
    every = classes(core=core)
    cards = sorted({card for *_, card in every})
    # The assembler writes to the process's own output, and a process that has compiled for one architecture cannot
    # compile for another.
    command = [sys.executable, str(Path(__file__)), *(["--core"] if core else []), "--compile"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    dumping = os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1"}

    def of_card(card: str) -> dict[str, dict[str, int]]:
        process = subprocess.run([*command, card], env=dumping, check=False, **pipes)
        if process.returncode:
            raise RuntimeError(process.stdout[-4000:])
        return _read(process.stdout, [what for what in every if what[3] == card])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {name: row for found in pool.map(of_card, cards) for name, row in found.items()}


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
            "shared_bytes": _shared_bytes(case, described(card)),
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


def faults(found: dict[str, dict[str, int]]) -> list[str]:
    """What is wrong with what was found, a sentence each: spilled registers, more of anything than is recorded."""
    before = recorded(RECORD)
    wrong = [f"{name} spills {row['spilled_bytes']} bytes" for name, row in found.items() if row["spilled_bytes"]]
    for name, row in found.items():
        card = described(name.partition("-")[0])
        if row["registers"] > 255 or row["shared_bytes"] > card.shared_bytes:
            wrong.append(f"{name} does not fit {card.name}: {row}")
        if before and name not in before:
            wrong.append(f"{name} is not recorded; run {__file__} --write")
        for quantity, most in before.get(name, {}).items():
            if row[quantity] > most:
                wrong.append(f"{name}: {quantity} was {most} and is {row[quantity]}; if that is meant, run --write")
    return wrong


def limits() -> str:
    """What each benchmark case must move and compute, and the time that takes on each card at least."""
    lines = [f"{'case':<22}{'MB':>9}{'GFLOP':>9}" + "".join(f"{name + ' us':>10}" for name in CARDS)]
    for name, case in BENCHMARKS.items():
        times = "".join(f"{1e6 * case.least_seconds(CARDS[card]):>10.1f}" for card in CARDS)
        lines.append(f"{name:<22}{case.bytes_moved(2) / 1e6:>9.1f}{case.operations / 1e9:>9.2f}{times}")
    return "\n".join(lines)


def main() -> None:
    if "--compile" in sys.argv:
        mine = [what for _, *what in classes(core="--core" in sys.argv) if what[2] == sys.argv[-1]]
        sizes = [compile_class(*what).memory_analysis().temp_size_in_bytes for what in mine]
        print(json.dumps(sizes), flush=True)
        return
    found = measure(core="--core" in sys.argv)
    if "--json" in sys.argv:
        print(json.dumps(found))
        return
    if "--check" in sys.argv:
        for name, row in found.items():
            print(name, json.dumps(row))
        sys.exit("\n".join(faults(found)) or 0)  # an empty text would be an error too
    for name, row in found.items():
        print(f"{name:<20}" + "".join(f"{value:>12,} {key}" for key, value in row.items()))
    print(limits())
    if "--write" in sys.argv:
        record(RECORD, found)


if __name__ == "__main__":
    main()
