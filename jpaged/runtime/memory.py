"""How much memory there is, asked of JAX, NVIDIA's driver, the operating system."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from jpaged.runtime.sizing import share_of

#: What the pool takes on a CPU where the caller gives no size.
DEFAULT_CPU_POOL_BYTES = 1 << 30
#: What an engine takes at most of the main memory that is available, where the caller gives no size.
CPU_SHARE = Fraction(1, 4)
#: kept free below JAX's own limit, for fragmentation and for programs beside the step
DEVICE_RESERVE_BYTES = 256 << 20
#: the share of a GPU's memory that JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise
JAX_DEFAULT_SHARE = Fraction(3, 4)


@dataclass(frozen=True)
class DeviceMemory:
    """What JAX tells of a device. All are bytes."""

    limit: int  # that JAX can take at most
    in_use: int  # by arrays and programs
    taken: int  # from the driver until now, whether in use or not


def device_memory(device: Any) -> DeviceMemory | None:
    """What JAX tells of `device`, or None where the backend does not say.

    CPUs and some plugins return None or an empty mapping from `memory_stats()`, or raise; that is an answer,
    not a fault: the caller then needs an explicit size, or takes the default for a CPU.
    """
    try:
        stats = device.memory_stats() or {}
    except (AttributeError, RuntimeError):  # JAX's own errors are RuntimeErrors
        return None
    if not (limit := stats.get("bytes_limit")):
        return None
    in_use = int(stats.get("bytes_in_use") or 0)
    return DeviceMemory(int(limit), in_use, max(in_use, int(stats.get("pool_bytes") or 0)))


@dataclass(frozen=True)
class CardMemory:
    """What NVIDIA's driver tells of a card. All are bytes."""

    total: int
    free: int  # that no process has


def card_memory(device: Any, environ: Mapping[str, str] | None = None) -> CardMemory | None:
    """What NVIDIA's driver tells of the card behind `device`, or None where there is no driver to ask, or it does not
    know the card.

    JAX tells only the share that it may take. What other processes hold of it, and what the whole card has, only the
    driver knows. It numbers cards as CUDA does with CUDA_DEVICE_ORDER=PCI_BUS_ID; `environ` (os.environ) tells which
    are visible, by number or by name.
    """
    try:
        import pynvml  # here, for a machine that has JAX alone can run an engine of a given size
    except ImportError:
        return None
    visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    number = int(device.local_hardware_id)
    try:
        name = visible.split(",")[number].strip() if visible else str(number)
        pynvml.nvmlInit()
        try:
            by_number = name.isdecimal()
            handle = (
                pynvml.nvmlDeviceGetHandleByIndex(int(name)) if by_number else pynvml.nvmlDeviceGetHandleByUUID(name)
            )
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, IndexError):
        return None
    return CardMemory(int(memory.total), int(memory.free))


def attainable_bytes(
    jax: DeviceMemory,
    utilization: float,
    *,
    card: CardMemory | None = None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Bytes that JAX and all in it can have of a card, what they hold now included.

    JAX takes a share of a card when it starts (XLA_PYTHON_CLIENT_MEM_FRACTION, three quarters by default) and reports
    that as its limit. `utilization` speaks of the card. There is nothing to be had beyond JAX's limit, nor beyond what
    it has taken and other processes have left free; either less `DEVICE_RESERVE_BYTES`.

    Args:
        card: None: the driver does not say; the card's size is worked out from the share that `environ` (os.environ)
            names.

    Warns:
        RuntimeWarning: JAX has less than was asked for, so that `utilization` cannot apply.

    Raises:
        ValueError: XLA_PYTHON_CLIENT_MEM_FRACTION is no number.
    """
    fraction = (os.environ if environ is None else environ).get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    try:
        share = Fraction(fraction) if fraction else JAX_DEFAULT_SHARE
    except ValueError:
        raise ValueError(f"XLA_PYTHON_CLIENT_MEM_FRACTION must be a number, got {fraction!r}") from None
    if not 0 < share <= 1:  # above 1 is unified memory: the limit is then all we know
        share = Fraction(1)
    total = card.total if card is not None else int(jax.limit / share)
    there = jax.limit if card is None else min(jax.limit, jax.taken + card.free)
    wanted, most = share_of(total, utilization), max(0, there - DEVICE_RESERVE_BYTES)
    if wanted > jax.limit:
        warnings.warn(
            f"gpu_memory_utilization {utilization:g} cannot apply: JAX has started and took {jax.limit:,} of the "
            f"{total:,} bytes of the card; weights, temporaries and pool get {most:,}. For more, set the environment "
            f"variable XLA_PYTHON_CLIENT_MEM_FRACTION to {min(1.0, utilization + 0.01):.2f} before JAX starts "
            "(in a notebook: restart the kernel and set it in the first cell), or ask for less",
            RuntimeWarning,
            stacklevel=2,
        )
    elif wanted > there:
        warnings.warn(
            f"gpu_memory_utilization {utilization:g} cannot apply: other processes hold memory of the card, and of its "
            f"{total:,} bytes {card.free if card else 0:,} are free; weights, temporaries and pool get {most:,}",
            RuntimeWarning,
            stacklevel=2,
        )
    return min(wanted, most)


def available_memory_bytes(read: Callable[[str], str] | None = None) -> int:
    """Bytes of main memory that this process could still take: the smallest of what the system calls available and
    what the process's control group leaves."""
    import psutil  # here, for a process that computes on a GPU needs neither this nor a file

    available = psutil.virtual_memory().available
    read = read or (lambda path: Path(path).read_text())
    try:  # by hand: psutil does not read control groups
        limit = read("/sys/fs/cgroup/memory.max").strip()
        if limit != "max":
            available = min(available, max(0, int(limit) - int(read("/sys/fs/cgroup/memory.current"))))
    except (OSError, ValueError):  # no control group, or one of the older kind: the first number stands
        pass
    return available
