"""Which implementation of an operation runs.

An operation registers its implementations with the platforms they run on. A caller names one, or says "auto": the
first in the list that runs on the platform at hand. A named implementation that cannot run is an error; nothing
falls back silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation. `platforms` is empty where any platform will do."""

    name: str
    function: Callable
    platforms: tuple[str, ...] = ()


def target_platform() -> str:
    """What is being compiled for: "cpu", "gpu", ...: that of the mesh in use, where it describes a device (ahead of
    time compilation for a card that is not here); else JAX's default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else jax.default_backend()


def choose(
    operation: str, implementations: Sequence[Implementation], name: str = "auto", platform: str | None = None
) -> Callable:
    """Returns the function of the implementation called `name` on `platform` (default: `target_platform`).

    `implementations` are in order of preference, for "auto".

    Raises:
        ValueError: for an unknown name, or one that does not run on the platform; both are named.
    """
    platform = platform or target_platform()
    for implementation in implementations:
        fits = not implementation.platforms or platform in implementation.platforms
        if name == "auto" and fits:
            return implementation.function
        if name == implementation.name:
            if fits:
                return implementation.function
            raise ValueError(
                f"{operation}: implementation {name!r} runs on {', '.join(implementation.platforms)}, "
                f"but the platform here is {platform}"
            )
    known = ", ".join(repr(i.name) for i in implementations)
    raise ValueError(f"{operation}: no implementation {name!r} for {platform}; there are 'auto', {known}")
