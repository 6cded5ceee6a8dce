"""The paged-attention kernel compiled for described cards: what the assembler reports of each class of shapes, against
the table in `tests/gpu/kernels.json`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pallas_kernels.cards import CARDS
from pallas_kernels.paged_attention.cases import BENCHMARKS, Case
from pallas_kernels.paged_attention.mosaic_gpu import NEEDS_JAX

SCRIPT = Path(__file__).parents[1] / "gpu" / "aot_kernels.py"


@pytest.mark.skipif(
    jax.__version_info__ < min(NEEDS_JAX.values()) or importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs JAX 0.11 and XLA's CUDA plugin; tests/gpu/check.sh makes environments with both",
)
@pytest.mark.parametrize("which", [("--core",), pytest.param((), marks=pytest.mark.whole)], ids=["core", "whole"])
def test_no_kernel_spills_and_none_grows(which):
    """Catches: an accumulator that no longer fits the registers, a stage that no longer fits shared memory, a shape
    that does not lower at all."""
    result = subprocess.run([sys.executable, str(SCRIPT), "--check", *which], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs XLA's CUDA plugin; tests/gpu/check.sh makes environments with it",
)
def test_a_card_without_a_kernel_never_waits_for_the_host():
    """A T4, and an H200 told to use XLA's operations. Catches: a conditional, a loop of unknown length, a copy of the
    pool, temporaries that grow with the context that a page table can hold."""
    script = SCRIPT.with_name("aot_xla.py")
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    found = json.loads(result.stdout.splitlines()[-1])
    for program in found:
        assert program["conditionals"] == 0 and program["unknown_loops"] == [], program
        assert program["pool_copies"] == 0, program
    # 512 keys an iteration: rows of 256 pages of 16 tokens take 8 of them, for one query and for several.
    assert [program["known_loops"] for program in found] == [[8], [16], [8, 8], [8, 8], [3, 3]]
    assert found[1]["temporary_bytes"] < 1.1 * found[0]["temporary_bytes"] < 600e6


def test_limits_are_what_they_are_by_hand():
    """Catches: keys counted once a query head, a window that is forgotten, queries that see what comes after them."""
    case = BENCHMARKS["decode-64x2048"]
    assert case.bytes_moved(2) == 2 * (64 * 2048 * 8 * 128 * 2 + 2 * 64 * 32 * 128)
    assert case.operations == 4 * 64 * 2048 * 32 * 128
    assert case.least_seconds(CARDS["h200"]) == case.bytes_moved(2) / 4.8e12
    prompt = Case("prompt", ((3, 5),), heads=2, kv_heads=1, head_dim=4, sliding_window=2)
    assert prompt.operations == 4 * (2 + 2 + 2) * 2 * 4
    assert prompt.bytes_moved(2) == 2 * 4 * (2 * 4 * 1 + 2 * 3 * 2)  # of 5 tokens the first is not seen
    long = BENCHMARKS["serve-long-prefill"]
    assert long.operations == 4 * sum(range(8192 - 2048 + 1, 8193)) * 32 * 128
    assert long.least_seconds(CARDS["h200"]) == long.operations / 989e12
