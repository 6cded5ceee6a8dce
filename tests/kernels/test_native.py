"""The code of a kernel for a CPU: kept beside JAX's compilation cache, and loaded from there without numba."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.cpu import native

ATTEND = """
import sys
import jax, jax.numpy as jnp, numpy as np
from pallas_kernels.paged_attention.api import paged_attention

def pages(start): return jnp.arange(start, start + 2 * 16 * 16, dtype=jnp.float32).reshape(1, 2, 1, 16, 16) / 300
out = paged_attention(
    jnp.ones((1, 1, 16)), pages(0), pages(100), 0, jnp.array([[1]]), jnp.array([0, 1]), jnp.array([3]), scale=0.25,
    implementation="numba",
)
np.save(sys.stdout.buffer, np.asarray(out))
sys.stderr.write(str("numba" in sys.modules))
"""


def attend(cache: Path) -> tuple[bytes, bool]:
    """A row of attention computed in a new process, and whether that process imported numba."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_ENABLE_COMPILATION_CACHE": "True"}
    run = subprocess.run([sys.executable, "-c", ATTEND], env=environment, capture_output=True, check=True)
    return run.stdout, run.stderr.endswith(b"True")


@pytest.mark.skipif(sys.platform == "win32", reason="the kernel needs a POSIX system")
def test_the_code_of_a_kernel_is_compiled_once_for_many_processes(tmp_path):
    """Catches: a kernel that is compiled in each process, code that holds an address of the process that made it, and
    a damaged file that is run."""
    made, with_numba = attend(tmp_path)
    assert with_numba
    (kept,) = (tmp_path / native.FOLDER).iterdir()
    assert attend(tmp_path) == (made, False)
    whole = kept.read_bytes()
    for damaged in (whole[:-1], whole[:2000] + b"?" + whole[2001:]):
        kept.write_bytes(damaged)
        assert native._read(kept) is None


def test_nothing_is_kept_where_jax_keeps_nothing(tmp_path, monkeypatch):
    """Catches: files in a cache that the user switched off, or that is no folder of this machine; code of other sources
    under the same name."""
    (source := tmp_path / "kernel.py").write_text("1")
    monkeypatch.setattr(native.jax, "config", config := type("Config", (), {})())
    config.jax_enable_compilation_cache, config.jax_compilation_cache_dir = True, str(tmp_path)
    where = native._kept_at("attend", [source])
    assert where.parent == tmp_path / native.FOLDER
    source.write_text("2")
    assert native._kept_at("attend", [source]) != where
    for enabled, folder in ((False, str(tmp_path)), (True, None), (True, "gs://bucket/cache")):
        config.jax_enable_compilation_cache, config.jax_compilation_cache_dir = enabled, folder
        assert native._kept_at("attend", [source]) is None


def test_a_cache_that_cannot_be_written_is_said_and_harmless(tmp_path, caplog):
    """Catches: a full or read-only disk that stops an engine."""
    (tmp_path / "file").write_text("")
    native._keep(tmp_path / "file" / "kernel.o", b"code")
    assert "compiled again next time" in caplog.text
