"""Which implementation of an operation runs.

An operation registers its implementations with the platforms they run on, and with what else they need. A caller
names one, or says "auto": the first in the list that can run on the platform. A named implementation that
cannot run is an error. "auto" falls back to a later one, and says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax


def _nothing(*operands: Any) -> str | None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
        platforms: where it runs; empty where any platform will do.
        missing: (operands) -> why it cannot compute them on such a platform, as the end of a sentence; None if it can.
    """

    name: str
    function: Callable
    platforms: tuple[str, ...] = ()
    missing: Callable[..., str | None] = _nothing


def target_platform() -> str:
    """What is being compiled for: "cpu", "gpu", ...: that of the mesh in use, where it describes a device (compilation
    ahead of time); else JAX's default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else jax.default_backend()


def choose(
    operation: str,
    implementations: Sequence[Implementation],
    name: str = "auto",
    platform: str | None = None,
    operands: Sequence[Any] = (),
) -> Callable:
    """Returns the function of the implementation called `name` on `platform` (default: `target_platform`) for
    `operands`, arrays or what has their shapes and dtypes.

    `implementations` are in order of preference, for "auto".

    Raises:
        ValueError: for an unknown name, one that does not run on the platform, or one that lacks something there; it
            the message says what.
    """
    platform = platform or target_platform()
    lacking = ""
    for implementation in implementations:
        if name not in ("auto", implementation.name):
            continue
        if implementation.platforms and platform not in implementation.platforms:
            if name == "auto":
                continue
            raise ValueError(
                f"{operation}: implementation {name!r} runs on {', '.join(implementation.platforms)}, "
                f"but the platform here is {platform}"
            )
        missing = implementation.missing(*operands)
        if missing is None:
            if lacking:
                _say_once(f"{operation}: {implementation.name!r} runs; {lacking}")
            return implementation.function
        lacking = f"{implementation.name!r} cannot, for {missing}"
        if name != "auto":
            raise ValueError(f"{operation}: implementation {lacking}")
    known = ", ".join(repr(i.name) for i in implementations)
    raise ValueError(
        f"{operation}: no implementation {name!r} for {platform}; there are 'auto', {known}"
        + (f" ({lacking})" if lacking else "")
    )


@cache
def _say_once(message: str) -> None:
    logging.getLogger("pallas_kernels").warning(message)
