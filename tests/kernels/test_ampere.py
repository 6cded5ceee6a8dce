"""The kernel for Ampere as it is compiled: its PTX, run in numpy.

`test_mosaic_gpu.py` runs it by Pallas's interpreter as it does those of other cards, but there `cp.async` is a TMA
copy, and `mma.sync` a product of whole arrays. What that leaves out is seen here: which thread copies what, how groups
of copies are counted, how operands lie in registers.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.gpu_aot import card as described
from support.ptx import Program

from pallas_kernels.cards import CAPABILITIES, CARDS
from pallas_kernels.paged_attention import ampere, mosaic_gpu

SCRIPT = Path(__file__).parents[1] / "gpu" / "emulate_ampere.py"


@pytest.mark.skipif(
    jax.__version_info__ < mosaic_gpu.NEEDS_JAX["ampere"] or importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs JAX 0.12 and XLA's CUDA plugin; .ci/run has an environment with both",
)
@pytest.mark.parametrize("which", [("--core",), pytest.param((), marks=pytest.mark.whole)], ids=["core", "whole"])
def test_what_is_compiled_computes_attention(which):
    """Catches: a row copied from the wrong page or to the wrong place, a wait for too few groups, a missing barrier, an
    operand whose elements lie in other threads; poison that a weight of zero lets through."""
    result = subprocess.run([sys.executable, str(SCRIPT), "--json", *which], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    for name, error in json.loads(result.stdout.splitlines()[-1]).items():
        assert error["out"] < 5e-3 and error["lse"] < 1e-5, (name, error)


@pytest.mark.parametrize("name", ["a100", "a10", "rtx5090"])
def test_shared_memory_is_used_and_not_exceeded(name):
    """Catches: a head_dim for which no stages fit; one block of threads where a core could have two; stages of a larger
    card given to one with 99 KiB."""
    card = described(name)
    of_core = CAPABILITIES[card.capability].shared_core_bytes
    for head_dim in (*range(16, 129, 16), *range(160, 257, 32)):
        block, stages = ampere.fitting(head_dim, card)
        taken = ampere.shared_bytes(head_dim, block, stages)
        assert taken <= card.shared_bytes
        least = min(ampere.shared_bytes(head_dim, size, 2) for size in ampere.blocks(head_dim))
        if 2 * (least + 1024) <= of_core and head_dim <= 128:
            assert 2 * (taken + 1024) <= of_core, head_dim


def said(monkeypatch, version, **changes):
    """What the kernel lacks on an A100 with that JAX."""
    monkeypatch.setattr(mosaic_gpu, "target_card", lambda: CARDS["a100"])
    monkeypatch.setattr(jax, "__version_info__", version)
    shape = {"heads": 28, "kv_heads": 4, "page": 3, "head_dim": 80, "dtype": jnp.bfloat16} | changes
    queries = jax.ShapeDtypeStruct((5, shape["heads"], shape["head_dim"]), shape["dtype"])
    pages = jax.ShapeDtypeStruct((2, 9, shape["kv_heads"], shape["page"], shape["head_dim"]), shape["dtype"])
    return mosaic_gpu.missing(queries, pages)


def test_an_a100_takes_it_or_is_told_what_is_missing(monkeypatch):
    """JX-05. Catches: a card or a JAX that finds out by a lowering trace."""
    assert said(monkeypatch, (0, 12, 0)) is None
    assert said(monkeypatch, (0, 11, 2)) == f"on a100 it needs JAX 0.12, and this is {jax.__version__}"
    assert said(monkeypatch, (0, 12, 0), head_dim=72).startswith("head_dim is 72")
    assert said(monkeypatch, (0, 12, 0), dtype=jnp.float32).startswith("queries are float32")


PTX = """
.visible .entry kernel(
	.param .u64 kernel_param_0
)
.minnctapersm 1
{
	ld.param::entry.b64 	%rd1, [kernel_param_0];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd2, %r1, 16;
	add.s64 	%rd3, %rd1, %rd2;
	xor.b32  	%r2, %r1, 64;
	mul.wide.u32 	%rd4, %r2, 16;
	cp.async.cg.shared.global [%rd2], [%rd3], 16;
	cp.async.commit_group;
	WAIT
	BARRIER
	ld.shared.b32 	%r3, [%rd4];
	add.f32 	%r4, %r3, %r3;
	st.b32 	[%rd3], %r4;
	ret;
}
"""


def run_ptx(text: str) -> np.ndarray:
    array = np.arange(512, dtype=np.float32)
    Program(text).run([array], (1, 1, 1), 2048)
    return array


def test_the_emulator_sees_races():
    """Catches: an emulator under which any kernel is right."""
    wait, barrier = "cp.async.wait_group 0;", "bar.sync 0;"
    right = PTX.replace("WAIT", wait).replace("BARRIER", barrier)
    threads = np.arange(128)
    np.testing.assert_array_equal(run_ptx(right)[4 * threads], 8.0 * (threads ^ 64))
    with pytest.raises(RuntimeError, match="not waited for"):
        run_ptx(right.replace(wait, ""))
    with pytest.raises(RuntimeError, match="not waited for"):
        run_ptx(right.replace(wait, "cp.async.wait_group 1;"))
    with pytest.raises(RuntimeError, match="race of two warps"):
        run_ptx(right.replace(barrier, ""))
    with pytest.raises(IndexError, match="outside"):
        run_ptx(right.replace("%r1, 16;", "%r1, 32;"))
    with pytest.raises(NotImplementedError):
        run_ptx(right.replace("add.f32", "sin.f32"))
