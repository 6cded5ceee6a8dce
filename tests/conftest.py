"""Settings of all tests: JAX on the CPU, strict about dtypes; hypothesis without deadlines."""

from __future__ import annotations

import gc
import importlib.metadata
import os
from pathlib import Path

# Before jax is imported, by whichever test comes first.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # engines of tests leave the user's cache as it is
    os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "False")
if importlib.metadata.version("jax").split(".")[:2] >= ["0", "11"]:
    # Pallas's GPU interpreter runs each thread of a kernel as a program that waits for the others. XLA's pool has as
    # many threads as there are cores: with two, they can all be taken by those who wait.
    os.environ.setdefault("NPROC", "16")

import jax
import pytest
from hypothesis import settings
from support.quick import compile_quickly
from support.tiny import TINY, tiny_decoder

from jpaged.runtime.programs import Programs

# An implicit promotion is how a float64, or a pool twice as wide, gets in unseen.
jax.config.update("jax_numpy_dtype_promotion", "strict")

#: The suite's: few examples, the same each time. `HYPOTHESIS_PROFILE=search` looks for new ones.
settings.register_profile("fixed", max_examples=15, deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


#: XLA maps memory for every program that it compiles, Linux allows a process 65,530 maps, and LLVM ends the process
#: where it gets none. After a module, and after a test of one that goes on.
_MOST_MAPS, _MOST_MAPS_WITHIN = 25_000, 40_000


def _give_programs_back(most: int) -> None:
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > most:
        Programs.shared.clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def programs_are_given_back():
    """After a module, where many have been compiled."""
    yield
    _give_programs_back(_MOST_MAPS)


@pytest.fixture(autouse=True)
def programs_are_given_back_within():
    """After a test, where very many have been compiled."""
    yield
    _give_programs_back(_MOST_MAPS_WITHIN)


@pytest.fixture(scope="module", autouse=True)
def programs_are_shared():
    """Engines of one module share programs also when no engine that uses them is left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "shared", {})
        yield


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(request):
    """In folders where nothing takes time but compiling, see `support.quick`."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name in ("unit", "property"):
            compile_quickly(patch)
        else:
            patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "False")
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def tiny():
    """TINY of the known-faults file: its configuration, decoder and parameters."""
    decoder, params = tiny_decoder(TINY)
    return TINY, decoder, params


def pytest_terminal_summary(terminalreporter):
    """Prints what tests recorded with `record_property`: counts of compiled programs, for people to read."""
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, [])]
    recorded = [(name, value) for report in reports for name, value in report.user_properties]
    if recorded:
        terminalreporter.section("recorded")
    for name, value in recorded:
        terminalreporter.write_line(f"{name}: {value}")
