"""What the compiler made of a program: memory, and the operations that cost a copy or a round trip to the host."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (\w+)\[([\d,]*)\][^ ]* ([\w\-]+)\(")
_WHILE = re.compile(r" while\(.*body=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def report(compiled: Any, pool_shape: tuple[int, ...]) -> dict[str, Any]:
    """Counts over all computations of `compiled`, whose pool has arrays of `pool_shape`.

    `unknown_loops` are the loops whose number of iterations is found while they run: a GPU asks the host each time.
    Each is given as the trip counts of the known loops around it, outermost first, so that `[[32], [32]]` are two
    loops inside the scan over 32 layers and `[[]]` is one at the top.
    """
    text, memory = compiled.as_text(), compiled.memory_analysis()
    computation, conditionals, pool_copies = "", 0, 0
    loops: list[tuple[str, str, int | None]] = []  # computation it stands in, its body, trips
    largest_copy = 0
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            computation = found[1]
        if found := _WHILE.search(line):
            trips = _TRIPS.search(line)
            loops.append((computation, found[1], int(trips[1]) if trips else None))
        conditionals += " conditional(" in line
        if (found := _INSTRUCTION.match(line)) and found[3] in ("copy", "copy-start"):
            shape = tuple(int(n) for n in found[2].split(",") if n)
            pool_copies += shape == pool_shape
            bits = re.search(r"\d+", found[1])
            largest_copy = max(largest_copy, int(np.prod(shape)) * (int(bits[0]) if bits else 8) // 8)
    around = {body: (place, trips) for place, body, trips in loops}

    def nest(place: str) -> list[int | None]:
        if place not in around:
            return []
        outer, trips = around[place]
        return [*nest(outer), trips]

    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "conditionals": conditionals,
        "known_loops": sorted(trips for _, _, trips in loops if trips is not None),
        "unknown_loops": sorted(nest(place) for place, _, trips in loops if trips is None),
        "pool_copies": pool_copies,
        "largest_copy_bytes": largest_copy,
    }
