"""Runs the Ampere kernel as it is compiled, in numpy: the same PTX that an A100 would be given.

    python tests/gpu/emulate_ampere.py            every class of shapes, in small
    python tests/gpu/emulate_ampere.py --core     the few that together have every layout of tiles
    python tests/gpu/emulate_ampere.py CASE ...   those of `cases.py`

Needs JAX 0.12 and XLA's CUDA plugin. `tests/kernels/test_ampere.py` runs some, and compares.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MOSAIC_GPU_DUMP_TO"] = tempfile.mkdtemp()
sys.path.insert(0, str(Path(__file__).parents[1]))  # support
sys.path.insert(0, str(Path(__file__).parents[2]))  # the project

import jax
import jax.numpy as jnp
import numpy as np
from support.attention import in_numpy
from support.gpu_aot import card, compile_for, mesh
from support.ptx import programs

from pallas_kernels.cards import CARDS, Card
from pallas_kernels.paged_attention import ampere
from pallas_kernels.paged_attention.cases import CASES, Case, operands
from pallas_kernels.paged_attention.mosaic_gpu import paged_attention_mosaic_gpu
from pallas_kernels.paged_attention.plan import num_rows

DUMP = Path(os.environ["MOSAIC_GPU_DUMP_TO"])
#: So few cores that contexts are cut, and of two blocks of keys and more.
CARD = replace(CARDS["a100"], cores=3)
#: A card with less shared memory, where blocks are smaller. The kernel is compiled for an A100 all the same.
SMALL_CARD = replace(card("l4"), cores=3)
#: Tiles of 16, 32 and 64 rows; blocks of 32 and 64 keys; rows of 32, 64 and 128 swizzled bytes; one piece of columns
#: and several; a window and a soft cap.
CORE = (
    "decode-head_dim64", "decode-head_dim80", "decode-ratio24", "mixed-head_dim96", "mixed-head_dim256", "mixed-page7",
    "window-cap", "small-mixed-head_dim128",
)  # fmt: skip
# The longest row last: what is read past its end of the page table is outside of it.
_MIXED = ((3, 3), (1, 65), (0, 0), (40, 170), (1, 260))
_DECODE = ((1, 1), (1, 64), (0, 0), (1, 330))


def classes() -> dict[str, tuple[Case, str, Card]]:
    """One case of each class of shapes, with its dtype and card, and pages of sizes that divide nothing."""
    sizes = (64, 80, 96, 112, 128, 192, 256)
    found = {f"mixed-head_dim{size}": Case("", _MIXED, head_dim=size) for size in sizes}
    found |= {f"decode-head_dim{size}": Case("", _DECODE, head_dim=size) for size in sizes}
    found |= {f"mixed-page{size}": Case("", _MIXED, head_dim=64, page_size=size) for size in (1, 3, 7, 24, 96, 256)}
    found |= {f"mixed-ratio{ratio}": Case("", _MIXED, head_dim=64, heads=2 * ratio) for ratio in (1, 7, 16)}
    found |= {f"decode-ratio{ratio}": Case("", _DECODE, head_dim=64, heads=2 * ratio) for ratio in (1, 7, 16, 24)}
    found["window-cap"] = Case("", _MIXED, head_dim=64, sliding_window=37, soft_cap=3.0)
    as_bfloat16 = {name: (case, "bfloat16", CARD) for name, case in found.items()}
    for size in (64, 96, 128, 192, 256):
        as_bfloat16[f"small-mixed-head_dim{size}"] = Case("", _MIXED, head_dim=size), "bfloat16", SMALL_CARD
        as_bfloat16[f"small-decode-head_dim{size}"] = Case("", _DECODE, head_dim=size), "bfloat16", SMALL_CARD
    return as_bfloat16 | {"float16": (Case("", _MIXED, head_dim=64), "float16", CARD)}


def emulated(attend):
    """`attend` of the kernel, compiled for an A100 when it is traced, and emulated when it is run."""

    def run(*operands, **options):
        compile_for(mesh("a100"), partial(attend, **options), *jax.tree.map(jax.typeof, operands))
        program, shared_bytes = list(programs(DUMP))[-1]
        kv_heads, _, head_dim = operands[0].shape
        used = num_rows(options["tile_tokens"], options["group"])
        tuning = options["tuning"]
        if shared_bytes > ampere.shared_bytes(head_dim, tuning.block, tuning.stages):
            raise AssertionError(f"{shared_bytes} bytes of shared memory, more than are counted with")
        parts, rows = operands[-1].shape[0], ampere.rows_of_tile(used, head_dim)

        def on_host(*operands):
            queries, k_pages, v_pages, layer, page_table, work = map(np.asarray, operands)
            queries = np.pad(queries, ((0, 0), (0, rows - used), (0, 0)))
            lse = np.full((parts, kv_heads, rows), np.nan, np.float32)
            out = np.full((*lse.shape, head_dim), np.nan, np.float32)
            # In the order in which the kernel first uses them.
            arrays = [work, layer, page_table, queries, out, lse, k_pages, v_pages]
            program.run(arrays, (parts, kv_heads, 1), shared_bytes)
            return out[:, :, :used], lse[:, :, :used]

        lse = jax.ShapeDtypeStruct((parts, kv_heads, used), np.float32)
        out = jax.ShapeDtypeStruct((*lse.shape, head_dim), np.float32)
        return jax.pure_callback(on_host, (out, lse), *operands)

    return run


def errors(case: Case, dtype: str, card: Card) -> dict[str, float]:
    """Against float64: of the outputs, relative to their norm, and the largest of a log-sum-exp."""
    arguments = operands(case, dtype=jnp.dtype(dtype))
    with mock.patch.object(ampere, "attend", emulated(ampere.attend)):
        out, lse = paged_attention_mosaic_gpu(*arguments, card=card, return_lse=True, **case.options)
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    expected, expected_lse = in_numpy(case, *arguments, return_lse=True)
    padding = expected_lse == -np.inf
    if not (lse[padding] == -np.inf).all():
        raise AssertionError("padding has a log-sum-exp")
    return {
        "out": float(np.linalg.norm(out - expected) / (np.linalg.norm(expected) or 1)),
        "lse": float(np.abs(lse - expected_lse)[~padding].max(initial=0)),
    }


def main() -> None:
    names = [name for name in sys.argv[1:] if not name.startswith("--")]
    chosen = {name: (CASES[name], "bfloat16", CARD) for name in names} or classes()
    if "--core" in sys.argv:
        chosen = {name: chosen[name] for name in CORE}
    found = {}
    for name, what in chosen.items():
        found[name] = errors(*what)
        if "--json" not in sys.argv:
            print(f"{name:<24}" + "".join(f"{value:>12.2e} {what}" for what, value in found[name].items()), flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
