"""What every checkpoint reader offers: named tensors, described at once and read one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor, known from the file's header alone.

    Attributes:
        shape: row-major, as `read` returns it.
        kind: how it is stored: "F32", "BF16", "Q4_K", ...
        file: the file that holds it, for error messages.
    """

    shape: tuple[int, ...]
    kind: str
    file: Path


class TensorSource(Protocol):
    """A checkpoint opened for reading. Opening checks every header; no weight is read before `read`.

    Attributes:
        path: the file or directory that was opened.
        metadata: what the checkpoint says about itself, as plain dicts, lists, strings and numbers.
    """

    @property
    def path(self) -> Path: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    def names(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the checkpoint, by its stored name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor: float32, float16 or bfloat16 (of ml_dtypes) as stored; float32 where it was quantised.

        Raises:
            ValueError: the name is not in the checkpoint, or its bytes cannot be read.
        """
        ...


def unknown_tensor(name: str, source: TensorSource) -> ValueError:
    """The error for a name that `source` does not hold."""
    some = ", ".join(list(source.names())[:5])
    return ValueError(f"{source.path} has no tensor {name!r}; it has {len(source.names())}, the first: {some}")
