"""From bytes of memory to pages, tokens and requests: exact integer arithmetic.

Bytes are bytes. Where this project speaks of an 80 GB card it means 80 * 10**9 of them. What a driver
reports for such a card differs by model (85,100,068,864 for an A100, 84,978,434,048 for an H100); when a real
device is asked, its own number is used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class ModelShape(Protocol):
    """What sizing reads of a model; `jpaged.models.spec.ModelConfig` has it."""

    @property
    def num_parameters(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element. Raises ValueError for a dtype that the pool cannot have."""
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype must be one of {tuple(DTYPE_BYTES)}, got {dtype!r}")
    return DTYPE_BYTES[dtype]


def kv_bytes_per_token(*, layers: int, kv_heads: int, head_dim: int, dtype: str) -> int:
    """Bytes of the keys and values of one token in all layers."""
    for name, value in (("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        _at_least(name, value, 1)
    return 2 * layers * kv_heads * head_dim * dtype_bytes(dtype)


def bytes_per_token(model: ModelShape, dtype: str) -> int:
    """Bytes of the keys and values of one token of `model`, in all layers."""
    return kv_bytes_per_token(
        layers=model.num_layers, kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype=dtype
    )


def weight_bytes(model: ModelShape, dtype: str) -> int:
    """Bytes of the weights of `model`, all of them stored as `dtype`."""
    return model.num_parameters * dtype_bytes(dtype)


@dataclass(frozen=True)
class Sizing:
    """How much room a pool has, and for whom. Bytes and tokens are exact integers.

    Args:
        memory_bytes: memory of the device.
        utilization: the share of it that weights, temporaries and pool may take together; in (0, 1].
        weight_bytes: bytes of the weights.
        temporary_bytes: bytes the compiled step needs while it runs.
        token_bytes: bytes of one token's keys and values, see `bytes_per_token`.
        page_size: token slots in a page.
        scratch_pages: pages in the pool that no request owns; a running engine has one.

    Raises:
        ValueError: naming the field; or saying by how much the memory is too small for one page.
    """

    memory_bytes: int
    utilization: float
    weight_bytes: int
    temporary_bytes: int
    token_bytes: int
    page_size: int = 16
    scratch_pages: int = 0

    def __post_init__(self):
        for name, least in (("memory_bytes", 1), ("weight_bytes", 0), ("temporary_bytes", 0),
                            ("token_bytes", 1), ("page_size", 1), ("scratch_pages", 0)):  # fmt: skip
            _at_least(name, getattr(self, name), least)
        if not 0 < self.utilization <= 1:
            raise ValueError(f"utilization must be in (0, 1], got {self.utilization}")
        if self.num_pages < 1:
            need = self.weight_bytes + self.temporary_bytes + (1 + self.scratch_pages) * self.page_bytes
            raise ValueError(
                f"no room for a single page: {need:,} bytes are needed (weights {self.weight_bytes:,}, "
                f"temporaries {self.temporary_bytes:,}, {1 + self.scratch_pages} page(s) of "
                f"{self.page_bytes:,}), {self.usable_bytes:,} may be used "
                f"({self.utilization:g} of {self.memory_bytes:,})"
            )

    @property
    def usable_bytes(self) -> int:
        """utilization x memory, rounded down."""
        return share_of(self.memory_bytes, self.utilization)

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_size

    @property
    def free_bytes(self) -> int:
        """What weights and temporaries leave of the usable bytes; negative where they do not fit."""
        return self.usable_bytes - self.weight_bytes - self.temporary_bytes

    @property
    def num_pages(self) -> int:
        """Pages that requests can own."""
        return self.free_bytes // self.page_bytes - self.scratch_pages

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool's arrays, scratch included."""
        return (self.num_pages + self.scratch_pages) * self.page_bytes

    @property
    def num_tokens(self) -> int:
        """Token slots that requests can own."""
        return self.num_pages * self.page_size

    def requests_reserved(self, length: int) -> int:
        """Requests that fit when each reserves `length` contiguous tokens, whatever it uses of them."""
        _at_least("length", length, 1)
        return self.num_tokens // length

    def requests_paged(self, average_length: int) -> int:
        """Requests of `average_length` tokens that fit when each holds just the pages it has reached."""
        _at_least("average_length", average_length, 1)
        return self.num_pages // -(-average_length // self.page_size)

    def table(self, *, reserved: tuple[int, ...] = (), average_length: int | None = None) -> str:
        """The arithmetic as lines of text: what is subtracted from what, and the requests that fit."""
        rows = [
            ("memory", f"{self.memory_bytes:,}", "bytes"),
            (f"usable at {self.utilization:g}", f"{self.usable_bytes:,}", "bytes"),
            ("- weights", f"{self.weight_bytes:,}", "bytes"),
            ("- temporaries of the step", f"{self.temporary_bytes:,}", "bytes"),
            ("= left for the pool", f"{self.free_bytes:,}", "bytes"),
            ("keys and values of a token", f"{self.token_bytes:,}", "bytes"),
            (f"a page of {self.page_size} tokens", f"{self.page_bytes:,}", "bytes"),
            ("pages", f"{self.num_pages:,}", "pages"),
            ("tokens", f"{self.num_tokens:,}", "tokens"),
        ]
        rows += [
            (f"reserved at {length:,} tokens each", f"{self.requests_reserved(length):,}", "requests")
            for length in reserved
        ]
        if average_length is not None:
            fit = self.requests_paged(average_length)
            rows.append((f"paged at {average_length:,} tokens on average", f"{fit:,}", "requests"))
        left, middle = (max(len(row[i]) for row in rows) for i in (0, 1))
        return "\n".join(f"{name:<{left}}  {value:>{middle}} {unit}" for name, value, unit in rows)

    def __str__(self) -> str:
        return self.table()


def size_model(
    model: ModelShape,
    *,
    memory_bytes: int,
    utilization: float,
    dtype: str,
    page_size: int = 16,
    temporary_bytes: int = 0,
    scratch_pages: int = 0,
    weights: int | None = None,
) -> Sizing:
    """The sizing of `model` on a device; `weights` are its real bytes where they are known."""
    return Sizing(
        memory_bytes=memory_bytes,
        utilization=utilization,
        weight_bytes=weight_bytes(model, dtype) if weights is None else weights,
        temporary_bytes=temporary_bytes,
        token_bytes=bytes_per_token(model, dtype),
        page_size=page_size,
        scratch_pages=scratch_pages,
    )


def parse_bytes(text: str) -> int:
    """Bytes from `80e9`, `80GB` (80 * 10**9) or `80GiB` (80 * 2**30). Raises ValueError for anything else."""
    # By hand: humanfriendly, bitmath and pydantic's ByteSize refuse 80e9, and humanfriendly reads '80 bananas' as 80.
    powers = {"k": 1, "m": 2, "g": 3, "t": 4}
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*(?:([kmgt])(i?)b|b?)\s*", text, re.IGNORECASE)
    try:
        number, prefix, binary = found.groups() if found else ("", None, None)
        value = Fraction(number) * (1024 if binary else 1000) ** (powers[prefix.lower()] if prefix else 0)
    except ValueError:
        raise ValueError(f"a size in bytes looks like 80e9, 80GB or 80GiB, not {text!r}") from None
    if value < 1 or value.denominator != 1:
        raise ValueError(f"a size must be a whole number of bytes, at least 1; {text!r} is not")
    return int(value)


def share_of(total: int, share: float) -> int:
    """`share` of `total`, rounded down, where 0.9 is nine tenths and not the binary number beside it."""
    return int(total * Fraction(str(share)))


def _at_least(name: str, value: int, least: int):
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
