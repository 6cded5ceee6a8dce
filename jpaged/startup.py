"""What a process of our own does before it imports JAX. Importing jpaged as a library does none of it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
#: the device file of NVIDIA's driver
NVIDIA_DEVICE = Path("/dev/nvidiactl")


def quiet_start() -> None:
    """Spares a machine without an NVIDIA card the error that JAX's CUDA plugin prints there.

    Only where the plugin is installed, no driver is there, and no platform was chosen.
    """
    installed = any(importlib.util.find_spec(name) is not None for name in CUDA_PLUGINS)
    if "JAX_PLATFORMS" not in os.environ and installed and not NVIDIA_DEVICE.exists():
        os.environ["JAX_PLATFORMS"] = "cpu"


def use_cores(count: int) -> None:
    """Keeps this process, and the threads it will start, to `count` of the cores it may run on.

    Raises:
        ValueError: there are fewer, or the system cannot do this.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("--threads needs Linux; elsewhere the engine takes all cores")
    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= count <= len(cores):
        raise ValueError(f"--threads {count}: this process may run on {len(cores)} core(s)")
    os.sched_setaffinity(0, cores[:count])
