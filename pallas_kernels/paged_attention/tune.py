"""Finds the fastest tunings of the GPU kernel on this machine's card, and keeps them in `tunings.json`.

    python -m pallas_kernels.paged_attention.tune --head-dim 64 128 --write

Each class of shapes (decode or mixed, and a head_dim) starts at its default and moves to the best of its neighbours,
which differ in one choice and the stages that go with it, until none is faster.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import jax

from pallas_kernels.cards import Card, target_card, target_kind
from pallas_kernels.paged_attention.cases import BENCHMARKS, Case
from pallas_kernels.paged_attention.mosaic_gpu import NEEDS_JAX, paged_attention_mosaic_gpu
from pallas_kernels.paged_attention.timing import seconds_of
from pallas_kernels.paged_attention.tuning import KINDS, TIMED, Kind, Tuning, candidates, default, entry

_CASES: dict[Kind, tuple[str, ...]] = {
    "decode": ("decode-8x2048", "decode-64x2048", "decode-8x32768", "serve-decode-ragged"),
    "mixed": ("serve-mixed", "serve-prefill", "serve-long-prefill"),
}
#: a tuning is faster if it takes less than this share of the time: what differs less is noise
_FASTER = 0.98


def cases(kind: Kind, head_dim: int) -> list[Case]:
    """What a class is timed with."""
    return [replace(BENCHMARKS[name], head_dim=head_dim) for name in _CASES[kind]]


def neighbours(tuning: Tuning, among: list[Tuning]) -> list[Tuning]:
    """Those that differ in stages alone, or in one other choice, with the most stages that go with it and one fewer."""

    def choices(t: Tuning) -> tuple[int, ...]:
        return t.tiles, t.block, t.query_slots, t.extra_parts

    most: dict[tuple[int, ...], int] = {}
    for other in among:
        most[choices(other)] = max(other.stages, most.get(choices(other), 0))

    def near(other: Tuning) -> bool:
        differ = sum(a != b for a, b in zip(choices(tuning), choices(other), strict=True))
        return other != tuning and differ <= 1 and other.stages >= most[choices(other)] - 1

    return [other for other in among if near(other)]


def search(
    card: Card, kind: Kind, head_dim: int, measure: Callable[[Tuning], float], say: Callable[[str], None] = print
) -> tuple[Tuning, float]:
    """The fastest tuning, and what it takes.

    Args:
        measure: what a tuning takes, in any unit. One that it cannot compile raises, and is not taken.
    """
    among = candidates(card, kind, head_dim)
    best = default(card, kind, head_dim)
    taken = {best: measure(best)}
    while True:
        for tuning in neighbours(best, among):
            if tuning in taken:
                continue
            try:
                taken[tuning] = measure(tuning)
            except Exception as error:  # whatever the compiler says of it, it is no choice
                taken[tuning] = math.inf
                say(f"{tuning}: {type(error).__name__}: {str(error)[:200]}")
            else:
                say(f"{tuning}: {taken[tuning]:.3f}")
        fastest = min(taken, key=lambda tuning: taken[tuning])
        if taken[fastest] >= _FASTER * taken[best]:
            return best, taken[best]
        best = fastest


def over_least(card: Card, which: list[Case], tuning: Tuning) -> float:
    """The time of some cases as a multiple of the least that the card needs for them: the geometric mean."""
    attend = partial(paged_attention_mosaic_gpu, card=card, tuning=tuning)
    shares = [seconds_of(case, attend) / case.least_seconds(card) for case in which]
    return math.exp(sum(math.log(share) for share in shares) / len(shares))


def write(path: Path, found: list[dict]) -> None:
    """Puts entries into the table, in place of older ones of the same class."""

    def key(e: dict) -> tuple:
        return e["card"], e["kind"], e["head_dim"]

    kept = [e for e in json.loads(path.read_text()) if key(e) not in map(key, found)]
    lines = ",\n".join(json.dumps(e) for e in sorted(kept + found, key=key))
    path.write_text(f"[\n{lines}\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--head-dim", nargs="+", type=int, default=[128])
    parser.add_argument("--write", action="store_true", help=f"keep what is found in {TIMED}")
    options = parser.parse_args()
    card = target_card()
    if card is None or card.kernel is None or jax.__version_info__ < NEEDS_JAX[card.kernel]:
        raise SystemExit(
            "a tuning is found by timing it on an NVIDIA GPU of compute capability 8.0 or later (9.0 with JAX older "
            f"than 0.12); here is {target_kind()} with JAX {jax.__version__}"
        )
    found = []
    for kind in options.kind:
        for head_dim in options.head_dim:
            tuning, taken = search(card, kind, head_dim, partial(over_least, card, cases(kind, head_dim)))
            print(f"{card.name} {kind} head_dim {head_dim}: {tuning}, {taken:.2f} x the least time")
            when = {"date": datetime.now(UTC).date().isoformat(), "jax": jax.__version__, "over_least": taken}
            found.append(entry(card, kind, head_dim, tuning, **when))
    if options.write:
        write(TIMED, found)


if __name__ == "__main__":
    main()
