"""Compiled programs that outlive the process, in XLA's compilation cache.

JAX has one such cache for a process, switched on by the global setting `jax_compilation_cache_dir`. An engine uses it
for its own programs, in a folder of the user's cache directory, unless the user has decided:

- `jax_compilation_cache_dir` (`JAX_COMPILATION_CACHE_DIR`) is set: that folder is used, by JAX's rules, and nothing is
  changed here.
- `jax_enable_compilation_cache` (`JAX_ENABLE_COMPILATION_CACHE`) is off, or `EngineConfig.compilation_cache` is False:
  nothing is kept.

The setting is there while an engine compiles, and taken back afterwards, so that JAX code beside the engine keeps to
what its author set. A program that another thread compiles at that very moment may be kept too. That is harmless: an
entry is found by all that decides what is in it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from pallas_kernels.cpu.native import machine

logger = logging.getLogger("jpaged")

_ENABLED, _FOLDER = "jax_enable_compilation_cache", "jax_compilation_cache_dir"
_LEAST_SECONDS = "jax_persistent_cache_min_compile_time_secs"
#: JAX keeps what takes a second to compile. An engine also has programs of less, which together take longer.
_WORTH_KEEPING = 0.05


def programs_dir() -> Path:
    """Where programs are kept: `programs` in the folder of fetched models (`$JPAGED_CACHE`, or the user's cache
    directory), then by processor, since XLA's key of a program for a CPU does not say which instructions it uses. The
    folder can be deleted at any time."""
    from checkpoints.fetch import cache_dir  # here, for it needs what reads checkpoints

    folder = cache_dir() / "programs"
    if jax.default_backend() != "cpu":
        return folder
    return folder / hashlib.sha256("\n".join(machine()).encode()).hexdigest()[:16]


@contextmanager
def programs_kept(wanted: bool) -> Iterator[None]:
    """While this lasts, programs are looked up in the cache before they are compiled, and kept there. Several threads
    may be inside at the same time.

    Args:
        wanted: `EngineConfig.compilation_cache`; False changes nothing.
    """
    ours = wanted and _setting.enter()
    try:
        yield
    finally:
        if ours:
            _setting.leave()


class _Setting:
    """JAX's setting, which is one for the process, and who needs it now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: dict[str, Any] = {}

    def enter(self) -> bool:
        """Returns whether this must be left again: not where the user has decided, or the folder cannot be used."""
        with self._lock:
            if not self._inside and not self._set():
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._change(self._before)

    def _set(self) -> bool:
        if not getattr(jax.config, _ENABLED) or getattr(jax.config, _FOLDER):
            return False
        folder = programs_dir()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.warning(
                "Compiled programs cannot be kept in %s (%s): they are compiled again next time", folder, error
            )
            return False
        self._before = {name: getattr(jax.config, name) for name in (_FOLDER, _LEAST_SECONDS)}
        self._change({_FOLDER: str(folder), _LEAST_SECONDS: min(_WORTH_KEEPING, self._before[_LEAST_SECONDS])})
        return True

    @staticmethod
    def _change(values: dict[str, Any]) -> None:
        for name, value in values.items():
            jax.config.update(name, value)
        jax_cache.reset_cache()  # JAX opens a folder once, and would go on with that


_setting = _Setting()
