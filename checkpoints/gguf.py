"""GGUF files: a bounded reader of the header, and tensors dequantised a piece at a time.

The types, block sizes and dequantisation are those of the `gguf` package. Its `GGUFReader` is not used: it
maps the file before it checks anything, follows lengths that a damaged header claims, and keeps two NumPy
arrays for each string of the vocabulary (4.5 s and some 50 MB for 49,152 tokens, where this takes 0.2 s).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from checkpoints.source import TensorInfo, unknown_tensor

#: storage types that are read; each is tested bit for bit against the reference dequantiser
CLAIMED_KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_PLAIN: dict[str, type] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_SCALARS = {
    GGUFValueType.UINT8: "<u1", GGUFValueType.INT8: "<i1", GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2", GGUFValueType.UINT32: "<u4", GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4", GGUFValueType.UINT64: "<u8", GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8", GGUFValueType.BOOL: "?",
}  # fmt: skip


class _Cursor:
    """Walks the header. Every length is compared with what is left of the file before it is used."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.at = 0

    def take(self, count: int, what: str) -> int:
        """Steps over `count` bytes and returns where they begin."""
        begin = self.at
        if count > len(self.data) - begin:
            raise ValueError(
                f"{self.path} is damaged or cut short: {what} needs {count:,} bytes at offset {begin:,}, "
                f"and the file ends at {len(self.data):,}. Download it again."
            )
        self.at = begin + count
        return begin

    def number(self, code: str, what: str) -> int:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize(code), what))[0]

    def text(self, what: str) -> str:
        length = self.number("Q", what)
        begin = self.take(length, what)
        # vocabularies hold pieces that are not valid UTF-8 on their own in some files: keep their bytes
        return self.data[begin : begin + length].decode("utf-8", errors="surrogateescape")

    def value(self, kind: int, what: str) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text(what)
        if kind == GGUFValueType.ARRAY:
            return self.array(self.number("I", what), self.number("Q", what), what)
        return self.array(kind, 1, what)[0]

    def array(self, kind: int, count: int, what: str) -> list[Any]:
        if kind == GGUFValueType.STRING:
            # each string takes 8 bytes at least, so a count beyond the file is refused before the loop
            self.at = self.take(8 * count, what)
            return [self.text(what) for _ in range(count)]
        dtype = _SCALARS.get(kind)  # type: ignore[call-overload]
        if dtype is None:
            raise ValueError(f"{self.path}: {what} has value type {kind}, which is not supported")
        begin = self.take(count * np.dtype(dtype).itemsize, what)
        return np.frombuffer(self.data, dtype, count, begin).tolist()


class GGUFSource:
    """A `.gguf` file.

    `metadata` holds its keys and values as Python values; arrays are lists. Shapes are row-major, that is,
    the reverse of the order in the file. F32, F16 and BF16 tensors are read as stored, quantised ones as
    float32.

    Raises:
        ValueError: naming the file and the tensor or key: not GGUF, damaged, cut short, a tensor beyond the
            end of the file, or a storage type outside `CLAIMED_KINDS`.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < 24:
                    raise ValueError(f"{self.path} has {size} bytes: not a whole GGUF file")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    self._read_header(_Cursor(self.path, data), size)
        except OSError as error:
            raise ValueError(f"{self.path} cannot be read: {error}") from error

    def names(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def pieces(self, name: str) -> list[slice]:
        return self._info(name).pieces()

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        info = self._info(name)
        offset, size = self._places[name]
        shape = info.shape
        if rows is not None and len(shape) > 1:  # a tensor of one axis is one piece
            row_bytes = size // shape[0]
            offset, size = offset + rows.start * row_bytes, (rows.stop - rows.start) * row_bytes
            shape = (rows.stop - rows.start, *shape[1:])
        # Read and not mapped: a file that is cut short while it is open is an error here, and a crash there.
        with self.path.open("rb") as file:
            stored = np.fromfile(file, np.uint8, size, offset=offset)
        if stored.size != size:
            raise ValueError(f"{self.path} was cut short while it was open: tensor {name!r} is not whole")
        if info.kind in _PLAIN:
            return stored.view(_PLAIN[info.kind]).reshape(shape)
        # a block whose scale is inf or NaN is the file's matter; it must not become a warning here
        with np.errstate(over="ignore", invalid="ignore"):
            # All blocks together: `quants.dequantize` would take 16 rows at a time.
            blocks = stored.reshape(-1, GGML_QUANT_SIZES[GGMLQuantizationType[info.kind]][1])
            return getattr(quants, info.kind).dequantize_blocks(blocks).reshape(shape)

    def _info(self, name: str) -> TensorInfo:
        if name not in self._infos:
            raise unknown_tensor(name, self)
        return self._infos[name]

    def _read_header(self, cursor: _Cursor, size: int) -> None:
        if cursor.data[cursor.take(4, "the magic number") : 4] != _MAGIC:
            raise ValueError(f"{self.path} does not begin with {_MAGIC!r}: it is not a GGUF file")
        version = cursor.number("I", "the version")
        if version not in _VERSIONS:
            raise ValueError(f"{self.path} is GGUF version {version} (or big-endian); supported: {_VERSIONS}")
        num_tensors = cursor.number("Q", "the number of tensors")
        num_keys = cursor.number("Q", "the number of keys")
        metadata: dict[str, Any] = {}
        last = "the header"
        for _ in range(num_keys):
            key = cursor.text(f"the key after {last}")
            last = f"key {key!r}"
            if key in metadata:
                raise ValueError(f"{self.path} has {last} twice")
            metadata[key] = cursor.value(cursor.number("I", last), last)
        self.metadata: Mapping[str, Any] = metadata

        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"{self.path}: key 'general.alignment' must be a power of two, got {alignment!r}")

        self._infos: dict[str, TensorInfo] = {}
        self._places: dict[str, tuple[int, int]] = {}
        last = "the keys"
        for _ in range(num_tensors):
            name = cursor.text(f"the tensor after {last}")
            last = f"tensor {name!r}"
            if name in self._infos:
                raise ValueError(f"{self.path} has {last} twice")
            self._read_tensor(cursor, name, last)
        start = -(-cursor.at // alignment) * alignment
        end = start
        for name, (offset, count) in sorted(self._places.items(), key=lambda item: item[1]):
            if offset % alignment or start + offset < end:
                raise ValueError(f"{self.path}: the offset {offset:,} of tensor {name!r} is not aligned, or overlaps")
            end = start + offset + count
            if end > size:
                raise ValueError(
                    f"{self.path} is cut short: tensor {name!r} ends at byte {end:,}, and the file at "
                    f"{size:,}. Download it again."
                )
            self._places[name] = (start + offset, count)

    def _read_tensor(self, cursor: _Cursor, name: str, what: str) -> None:
        rank = cursor.number("I", what)
        if not 1 <= rank <= _MAX_DIMENSIONS:
            raise ValueError(f"{self.path}: {what} has {rank} dimensions; allowed: 1 to {_MAX_DIMENSIONS}")
        shape = tuple(cursor.number("Q", what) for _ in range(rank))[::-1]
        code = cursor.number("I", what)
        known = {int(kind): kind for kind in GGMLQuantizationType}
        kind = known[code].name if code in known else f"type {code}"
        if kind not in CLAIMED_KINDS:
            raise ValueError(f"{self.path}: {what} is stored as {kind}; supported: {', '.join(CLAIMED_KINDS)}")
        offset = cursor.number("Q", what)
        block, block_bytes = GGML_QUANT_SIZES[known[code]]
        elements = 1
        for size in shape:
            elements *= size  # Python integers: a damaged shape must not wrap around
        if elements < 1 or shape[-1] % block:
            raise ValueError(f"{self.path}: {what} has shape {shape}; {kind} needs rows in multiples of {block}")
        self._infos[name] = TensorInfo(shape, kind, self.path)
        self._places[name] = (offset, elements // block * block_bytes)
