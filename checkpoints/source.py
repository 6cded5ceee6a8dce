"""What every checkpoint reader offers: named tensors, described at once and read one at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

#: bytes, as float32, of a piece in which a tensor is read: its intermediate values stay in a core's cache
PIECE_BYTES = 1 << 20
_DTYPES = {"F16": np.float16, "float16": np.float16, "BF16": ml_dtypes.bfloat16, "bfloat16": ml_dtypes.bfloat16}


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

    @property
    def dtype(self) -> np.dtype:
        """Of what loading makes of it where no other dtype is asked for: float16 and bfloat16 stay, all else, quantised
        or in double precision, is float32."""
        return np.dtype(_DTYPES.get(self.kind, np.float32))

    def pieces(self) -> list[slice]:
        """Slices of the first axis that cover the tensor, each of at most `PIECE_BYTES` or one row. A tensor of one
        axis is one piece."""
        rows, *inner = self.shape or (1,)
        if not inner:
            return [slice(0, rows)]
        step = max(1, PIECE_BYTES // (4 * math.prod(inner)))
        return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


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

    def pieces(self, name: str) -> list[slice]:
        """Slices of the first axis in which `read` is to be asked for a tensor, so that little of it is in memory at a
        time. They cover it, in order.

        Raises:
            ValueError: the name is not in the checkpoint.
        """
        ...

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """One tensor: float64, float32, float16 or bfloat16 (of ml_dtypes) as stored; float32 where it was quantised.

        Args:
            rows: one of `pieces`; None: all.

        Raises:
            ValueError: the name is not in the checkpoint, or its bytes cannot be read.
        """
        ...


def unknown_tensor(name: str, source: TensorSource) -> ValueError:
    """The error for a name that `source` does not hold."""
    some = ", ".join(list(source.names())[:5])
    return ValueError(f"{source.path} has no tensor {name!r}; it has {len(source.names())}, the first: {some}")
