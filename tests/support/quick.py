"""XLA's cheapest compilation on the CPU, for tests whose programs are compiled once and run for milliseconds."""

from __future__ import annotations

import os
from functools import lru_cache

import jax
import pytest

#: The older emitters of kernels take half the time of those built on MLIR, and a program in one piece less than one in
#: 32. A compiled step of the tests takes 3.8 s without these two and 1.4 s with them (JAX 0.10.2).
_OPTIONS = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


@lru_cache
def quick_options() -> dict[str, bool | int]:
    """Those of the options that this XLA has: newer ones have no older emitters."""
    return {name: value for name, value in _OPTIONS.items() if _is_known(name, value)}


def _is_known(name: str, value: bool | int) -> bool:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        assert "No such compile option" in str(error)
        return False
    return True


def compile_quickly(patch: pytest.MonkeyPatch) -> None:
    """Everything that is compiled while `patch` holds, here and in the processes that tests start, is compiled with
    `quick_options` and without LLVM's optimizations. Also there: programs compiled otherwise round otherwise."""
    from jax._src import compiler  # JAX has no public setting for options of all programs

    options, original = quick_options(), compiler.get_compile_options

    def with_options(*args, env_options_overrides=None, **kwargs):
        return original(*args, env_options_overrides=options | (env_options_overrides or {}), **kwargs)

    patch.setattr(compiler, "get_compile_options", with_options)
    # This process has read its XLA_FLAGS already, when `quick_options` compiled.
    flags = [os.environ.get("XLA_FLAGS", ""), *(f"--{name}={str(value).lower()}" for name, value in options.items())]
    patch.setenv("XLA_FLAGS", " ".join(flags).strip())
    patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "True")
    jax.config.update("jax_disable_most_optimizations", True)
