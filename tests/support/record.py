"""Numbers kept in the repository for the next change to be compared with: JSON, by JAX version, a line a row."""

from __future__ import annotations

import json
from pathlib import Path

import jax

Rows = dict[str, dict] | list[dict]


def recorded(path: Path) -> Rows:
    """The rows that this JAX gave; none if it was not asked yet."""
    return json.loads(path.read_text()).get(jax.__version__, {})


def record(path: Path, rows: Rows) -> None:
    """Makes `rows` those of this JAX."""
    versions = json.loads(path.read_text()) | {jax.__version__: rows}
    path.write_text("{\n" + ",\n".join(f' "{name}": {_lines(versions[name])}' for name in sorted(versions)) + "\n}\n")


def _lines(rows: Rows) -> str:
    if isinstance(rows, dict):
        return "{\n" + ",\n".join(f'  "{name}": {json.dumps(row)}' for name, row in rows.items()) + "\n }"
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
