"""What the GPUs are that kernels are written for: the numbers by which tiles are chosen and limits worked out."""

from __future__ import annotations

import re
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Card:
    """A GPU, by NVIDIA's data sheet of its largest form (SXM).

    Attributes:
        architecture: sm_90a and the like, as the assembler is told.
        cores: streaming multiprocessors.
        shared_bytes: shared memory that a block of threads may have.
        bytes_per_s: of its memory.
        flops_per_s: of dense products in bfloat16, accumulated in float32.
    """

    name: str
    architecture: str
    cores: int
    shared_bytes: int
    bytes_per_s: float
    flops_per_s: float


CARDS = {
    card.name: card
    for card in (
        Card("a100", "sm_80", 108, 166_912, 2.039e12, 312e12),
        Card("h100", "sm_90a", 132, 232_448, 3.352e12, 989e12),
        Card("h200", "sm_90a", 132, 232_448, 4.8e12, 989e12),
        Card("b200", "sm_100a", 148, 232_448, 7.672e12, 2250e12),
    )
}


def card_of(device_kind: str) -> Card | None:
    """The card that JAX calls `device_kind` ("NVIDIA H100 80GB HBM3"), or None where it is not in `CARDS`."""
    names = re.findall(r"[a-z]+\d+", device_kind.lower())
    return next((CARDS[name.removeprefix("g")] for name in names if name.removeprefix("g") in CARDS), None)


def target_kind() -> str:
    """JAX's name of the device that is being compiled for: that of the mesh in use, where it describes one (ahead of
    time compilation for a card that is not here); else of JAX's first device."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return described.device_kind if described is not None else jax.devices()[0].device_kind


def target_card() -> Card | None:
    """The card that is being compiled for, or None."""
    return card_of(target_kind())
