"""What the GPUs are that kernels are written for: the numbers by which tiles are chosen and limits worked out.

What matters for a kernel follows from a card's compute capability and its number of cores, which JAX tells of every
device. So a card needs no entry here to have a kernel. `CARDS` holds cards whose data sheets are known: they are
described when kernels are compiled without a card, and their bandwidth and rate are exact where another card's are
estimated from its capability.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.extend.backend import get_default_device

#: The kernels, by the tensor cores that they use: `mma.sync`, which every card from Ampere on has; `wgmma` of Hopper
#: alone; `tcgen05` of Blackwell's server cards alone.
Kernel = Literal["ampere", "hopper", "blackwell"]


@dataclass(frozen=True)
class Capability:
    """What all cards of a compute capability have, by the CUDA programming guide; the last two by their data sheets.

    Attributes:
        kernel: the one that such a card runs; None: there is none.
        shared_bytes: shared memory that a block of threads may have.
        shared_core_bytes: shared memory of a core.
        flops_per_core: dense products in bfloat16 (float16 on Turing) a core computes in a second, roughly: what a core
            computes in a cycle is fixed, clocks differ.
        bytes_per_core: bytes of device memory a second for each core, roughly.
    """

    kernel: Kernel | None
    shared_bytes: int
    shared_core_bytes: int
    flops_per_core: float
    bytes_per_core: float


#: By compute capability. A GeForce card of 8.6, 8.9 and 12.0 computes half of this.
CAPABILITIES = {
    (7, 5): Capability(None, 65_536, 65_536, 1.6e12, 8e9),  # T4, RTX 20
    (8, 0): Capability("ampere", 166_912, 167_936, 2.9e12, 16e9),  # A100, A30
    (8, 6): Capability("ampere", 101_376, 102_400, 1.7e12, 10e9),  # A10, A40, RTX 30
    (8, 7): Capability("ampere", 166_912, 167_936, 1.2e12, 12e9),  # Orin
    (8, 9): Capability("ampere", 101_376, 102_400, 2.1e12, 7e9),  # L4, L40, RTX 40
    (9, 0): Capability("hopper", 232_448, 233_472, 7.5e12, 30e9),  # H100, H200, GH200
    (10, 0): Capability("blackwell", 232_448, 233_472, 15e12, 50e9),  # B200
    (10, 3): Capability("blackwell", 232_448, 233_472, 15e12, 50e9),  # B300
    (12, 0): Capability("ampere", 101_376, 102_400, 2.5e12, 10e9),  # RTX 50, RTX PRO
    (12, 1): Capability("ampere", 101_376, 102_400, 2.5e12, 6e9),  # GB10
}
#: A capability above 8.0 that is not listed runs the kernel that every card can run, in the least shared memory of any.
_OTHER = Capability("ampere", 101_376, 102_400, 2.5e12, 10e9)


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        name: short, as in `CARDS`; of a card that is not there what JAX calls it.
        capability: its compute capability, major and minor.
        kernel: the one that it runs; None: none.
        cores: streaming multiprocessors.
        shared_bytes: shared memory that a block of threads may have.
        bytes_per_s: of its memory.
        flops_per_s: of dense products in bfloat16, accumulated in float32.
        estimated: the last two are estimates by capability, and not of a data sheet.
    """

    name: str
    capability: tuple[int, int]
    kernel: Kernel | None
    cores: int
    shared_bytes: int
    bytes_per_s: float
    flops_per_s: float
    estimated: bool = False


def _listed(name: str, capability: tuple[int, int], cores: int, bytes_per_s: float, flops_per_s: float) -> Card:
    known = CAPABILITIES[capability]
    return Card(name, capability, known.kernel, cores, known.shared_bytes, bytes_per_s, flops_per_s)


#: By NVIDIA's data sheets, the largest form (SXM) of each.
CARDS = {
    card.name: card
    for card in (
        _listed("a100", (8, 0), 108, 2.039e12, 312e12),
        _listed("h100", (9, 0), 132, 3.352e12, 989e12),
        _listed("h200", (9, 0), 132, 4.8e12, 989e12),
        _listed("b200", (10, 0), 148, 7.672e12, 2250e12),
    )
}


def card_of(device_kind: str, capability: str | tuple[int, int] | None = None, cores: int | None = None) -> Card | None:
    """The card that JAX calls `device_kind` ("NVIDIA H100 80GB HBM3").

    Args:
        capability: its compute capability, as JAX says it ("8.6") or as two numbers; None where it is not known: then
            the card must be one of `CARDS`.
        cores: its streaming multiprocessors; None: those of its entry in `CARDS`.

    Returns:
        None for what is no NVIDIA GPU, and for one of which neither the capability nor the name is known.
    """
    names = [name.removeprefix("g") for name in re.findall(r"[a-z]+\d+", device_kind.lower())]
    listed = next((CARDS[name] for name in names if name in CARDS), None)
    if isinstance(capability, str):
        found = re.fullmatch(r"(\d+)\.(\d+)", capability)
        if found is None:  # AMD's are called gfx942 and the like
            return None
        capability = int(found[1]), int(found[2])
    if capability is None:
        return listed
    if listed is not None and listed.capability == capability and cores in (None, listed.cores):
        return listed
    known = CAPABILITIES.get(capability) or (_OTHER if capability >= (8, 0) else CAPABILITIES[7, 5])
    kernel = known.kernel if capability >= (8, 0) else None
    cores = cores or (listed.cores if listed else 1)
    share = 0.5 if "geforce" in device_kind.lower() and capability > (8, 0) else 1.0
    return Card(
        device_kind, capability, kernel, cores, known.shared_bytes, cores * known.bytes_per_core,
        share * cores * known.flops_per_core, estimated=True,
    )  # fmt: skip


def card_of_device(device: Any) -> Card | None:
    """The card that a JAX device is, described ones among them; None: no NVIDIA GPU."""
    if device.platform != "gpu":
        return None
    capability = getattr(device, "compute_capability", None)
    return card_of(device.device_kind, capability, getattr(device, "core_count", None))


def target_kind() -> str:
    """JAX's name of the device that is being compiled for: that of the mesh in use, where it describes one (compilation
    ahead of time); else of JAX's default device."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return described.device_kind if described is not None else get_default_device().device_kind


def target_card() -> Card | None:
    """The card that is being compiled for, or None.

    A mesh that describes a device names its kind and cores, and not its capability. That is taken from the default
    device if it is of that kind, else from another device of that kind, else from `CARDS`.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    default = get_default_device()
    if described is None:
        return card_of_device(default)
    if described.platform not in ("gpu", "cuda"):
        return None
    devices: Sequence[Any] = (default, *jax.devices())
    same = next((device for device in devices if device.device_kind == described.device_kind), None)
    return card_of_device(same) if same is not None else card_of(described.device_kind, None, described.num_cores)
