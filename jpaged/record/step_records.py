"""Step records on the host: unstacked, trimmed, named, and compared to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jpaged.step import StepRecord, Submission
from jpaged.step.decisions import Placed

#: Leaves of `Placed` that are as long as its count says.
LISTS = (".page", ".slot", ".column")


def leaves(record: StepRecord | Submission) -> list[tuple[str, np.ndarray]]:
    """Every array of a record or submission and its name, such as `decisions.found.page`."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), np.asarray(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(record)
    ]


def unstacked(records: StepRecord) -> list[StepRecord]:
    """The records of the steps of a burst, from numpy arrays `[steps, ...]`, as a trace keeps them."""
    steps = range(records.uid.shape[0])
    return [_trimmed(jax.tree.map(lambda a, step=step: a[step], records)) for step in steps]


def _trimmed(record: StepRecord) -> StepRecord:
    """A record of numpy arrays without the unused places of its lists."""

    def cut(part: Any) -> Any:
        if not isinstance(part, Placed):
            return np.asarray(part)
        if part.count > part.most:
            raise RuntimeError(
                f"a step gave slots {part.count} pages in one way, and its record has room for {part.most}: the trace "
                "would not be whole; please report this"
            )
        used: dict[str, Any] = {
            name: np.array(getattr(part, name)[: part.count]) for name in ("page", "slot", "column")
        }
        return replace(part, **used)

    return jax.tree.map(cut, record, is_leaf=lambda part: isinstance(part, Placed))


def record_difference(one: StepRecord, other: StepRecord) -> str | None:
    """The first thing in which two records of numpy arrays are not the same to the bit, in words; None: nothing."""
    return difference(dict(leaves(one)), dict(leaves(other)))


def difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> str | None:
    for name in one:
        a, b = one[name], other[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{name} is {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
        if a.tobytes() != b.tobytes():  # to the bit: nan is nan, and -0.0 is not 0.0
            bits = [np.ascontiguousarray(x).view(f"V{x.itemsize}") for x in (np.atleast_1d(a), np.atleast_1d(b))]
            place = np.argwhere(bits[0] != bits[1])[0]
            at = f"[{', '.join(map(str, place))}]" if a.ndim else ""
            return f"{name}{at} is {np.atleast_1d(a)[tuple(place)]} and {np.atleast_1d(b)[tuple(place)]}"
    return None
