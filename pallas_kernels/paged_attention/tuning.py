"""Tiles, stages and warps of the GPU kernels: data for each card and class of shapes.

`tunings.json` holds what `tune.py` found to be fastest on a card. A class that is not in it gets `default`: what fills
the card's shared memory. The table is empty until a card is at hand: one command (`tune --write`) then fills it.

A class of shapes is a kind and a head_dim. Kinds are chosen by static shape: where there are no more tokens than rows,
nearly all rows decode ("decode": a tile is one token); else it is a "mixed" batch, prefill chunks among it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal

from pallas_kernels.cards import Card
from pallas_kernels.paged_attention import ampere
from pallas_kernels.paged_attention.tensor_cores import TENSOR_CORES

Kind = Literal["decode", "mixed"]
KINDS: tuple[Kind, ...] = ("decode", "mixed")
TIMED = Path(__file__).with_name("tunings.json")
#: pages and blocks are cut into pieces that divide this
BLOCK = 64


@dataclass(frozen=True)
class Tuning:
    """What may be chosen for a card and a class of shapes.

    Attributes:
        tiles: of queries that a block of threads computes at the same time, with the same keys, in warpgroups of
            their own; 1 where a tile is one token, and on Ampere.
        block: keys of one stage, a multiple of 64; on Ampere of 32 where head_dim is one of 32.
        stages: blocks of keys in flight.
        query_slots: tiles of queries in shared memory: with two, the next part's are there when it starts; 1 on Ampere.
        extra_parts: pieces that long contexts are cut into, beyond one for each tile and KV head: so many a core.
    """

    tiles: int
    block: int
    stages: int
    query_slots: int
    extra_parts: int


def kind_of(tokens: int, rows: int) -> Kind:
    return "decode" if tokens <= rows else "mixed"


def tile_rows(card: Card) -> int:
    """Rows of a tile: queries times the query heads that share a KV head."""
    return ampere.TILE if card.kernel == "ampere" else TENSOR_CORES[card.kernel].tile


def shared_bytes(tuning: Tuning, card: Card, head_dim: int) -> int:
    """Shared memory of one block of threads, with 3 KiB for barriers, reductions and alignment."""
    if card.kernel == "ampere":
        return ampere.shared_bytes(head_dim, tuning.block, tuning.stages)
    cores = TENSOR_CORES[card.kernel]
    rows = tuning.tiles * cores.tile
    queries = tuning.query_slots * rows * head_dim * 2
    stages = tuning.stages * 2 * tuning.block * head_dim * 2
    weights, outs = tuning.block * 2, cores.columns(head_dim)[1] * 4  # outputs on their way to memory
    return queries + stages + cores.sharing(head_dim) * rows * (weights + outs + 4) + 3072


def candidates(card: Card, kind: Kind, head_dim: int) -> list[Tuning]:
    """Every tuning that fits the card, for a tuner to choose from."""
    if card.kernel == "ampere":
        choices = product([1], ampere.blocks(head_dim), range(2, 7), [1], (1, 2, 4))
    else:
        most_tiles = TENSOR_CORES[card.kernel].most_tiles(head_dim) if kind == "mixed" else 1
        choices = product(range(1, 1 + most_tiles), (BLOCK, 2 * BLOCK), range(2, 7), (1, 2), (1, 2, 4))
    found = [Tuning(*choice) for choice in choices]
    return [tuning for tuning in found if shared_bytes(tuning, card, head_dim) <= card.shared_bytes]


def default(card: Card, kind: Kind, head_dim: int) -> Tuning:
    """Three stages where they fit; then as many tiles, slots of queries, and stages as there can be, in this order."""
    extra = 2 if kind == "decode" else 1
    if card.kernel == "ampere":
        return Tuning(1, *ampere.fitting(head_dim, card), 1, extra)
    fits = [t for t in candidates(card, kind, head_dim) if t.block == BLOCK and t.extra_parts == extra]
    return max(fits, key=lambda t: (t.stages >= 3, t.tiles, t.query_slots, t.stages))


def tuning_for(card: Card, kind: Kind, head_dim: int) -> Tuning:
    """What was fastest on the card, or `default`."""
    return timed().get((card.name, kind, head_dim)) or default(card, kind, head_dim)


@cache
def timed(path: Path = TIMED) -> dict[tuple[str, Kind, int], Tuning]:
    """What `tune.py` found, by card, kind and head_dim."""
    return {
        (entry["card"], entry["kind"], entry["head_dim"]): Tuning(**entry["tuning"])
        for entry in json.loads(path.read_text())
    }


def entry(card: Card, kind: Kind, head_dim: int, tuning: Tuning, **measured: object) -> dict[str, object]:
    """One element of `tunings.json`; `measured` says when, with what and how fast."""
    return {"card": card.name, "kind": kind, "head_dim": head_dim, "tuning": asdict(tuning)} | measured
