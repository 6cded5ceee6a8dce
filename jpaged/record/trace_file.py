"""Files of traces: inputs and step records as one `.npz`, without pickle."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpaged.record.inputs import INPUTS, Abort, Input, Submit
from jpaged.record.step_records import LISTS, leaves
from jpaged.step import StepRecord, Submission
from jpaged.step.decisions import Decisions, Placed

#: Of the files that `write` makes; another number is another layout.
FORMAT = 4


def write(path: Path, head: dict[str, Any], inputs: Sequence[Input], records: Sequence[StepRecord]) -> None:
    """Writes a file, which appears complete or not at all. `head` is JSON's, and kept as it is."""
    batches = [given.batch for given in inputs if isinstance(given, Submit)]
    about = head | {
        "format": FORMAT,
        "inputs": [
            [type(given).__name__, *([len(given.batch.uid)] if isinstance(given, Submit) else vars(given).values())]
            for given in inputs
        ],
    }
    columns: dict[str, list[np.ndarray]] = {}
    longest = max((batch.tokens.shape[1] for batch in batches), default=0)
    for batch in batches:
        for name, rows in leaves(batch):
            short = longest - rows.shape[1] if name == "tokens" else 0
            columns.setdefault(f"submission.{name}", []).append(np.pad(rows, ((0, 0), (0, short))) if short else rows)
    for record in records:
        for name, value in leaves(record):
            # The lists of a step are as long as their count says; all else has one shape.
            columns.setdefault(f"record.{name}", []).append(value if name.endswith(LISTS) else value[None])
    arrays = {name: np.concatenate(parts) for name, parts in columns.items()}
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)  # type: ignore[arg-type]
    partial.replace(path)


def read(path: Path) -> tuple[dict[str, Any], list[Input], list[StepRecord]]:
    """What `write` was given: head, inputs, records.

    Raises:
        ValueError: for a file that is not a trace, one of another format, or one that lacks something.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        about = json.loads(str(arrays.pop("about")))
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a trace that Trace.save wrote: {error}") from error
    if about["format"] != FORMAT:
        raise ValueError(f"{path} has format {about['format']}; this version of jpaged reads {FORMAT}")
    try:
        inputs, steps = _inputs(about["inputs"], arrays)
        return about, inputs, _records(steps, arrays)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} was written by another version of jpaged: {error}") from error


def _inputs(stored: list, arrays: dict[str, np.ndarray]) -> tuple[list[Input], int]:
    """The inputs, and how many steps their bursts have."""
    inputs: list[Input] = []
    row = steps = 0
    empty = Submission.empty(0, 0)
    names, structure = [name for name, _ in leaves(empty)], jax.tree.structure(empty)
    for kind, *values in stored:
        if kind == "Submit":
            rows = slice(row, row := row + values[0])
            batch = jax.tree.unflatten(structure, [arrays[f"submission.{name}"][rows] for name in names])
            inputs.append(Submit.of(batch))
        elif kind == "Abort":
            inputs.append(Abort(tuple(values[0])))
        else:
            inputs.append(INPUTS[kind](*values))
            steps += values[1] if kind == "Burst" else 0
    return inputs, steps


def _records(steps: int, arrays: dict[str, np.ndarray]) -> list[StepRecord]:
    # Any record of the right structure will do: its leaves are replaced.
    empty = Placed.empty(0)
    like = StepRecord.zeros(0, Decisions(empty.page, empty.page, empty, empty, empty, empty, empty.page))
    names, structure = [name for name, _ in leaves(like)], jax.tree.structure(like)
    ends = {name: np.cumsum(arrays[f"record.{name}"]) for name in names if name.endswith(".count")} if steps else {}
    records = []
    for step in range(steps):
        values = []
        for name in names:
            at: Any = step
            if name.endswith(LISTS):
                end = ends[f"{name.rpartition('.')[0]}.count"]
                at = slice(end[step - 1] if step else 0, end[step])
            values.append(np.asarray(arrays[f"record.{name}"][at]))
        records.append(jax.tree.unflatten(structure, values))
    return records
