"""Numbers that callers give, made by Python, NumPy or JAX. What is stored is a Python number."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any


def integer(value: Any) -> int:
    """An integer as a Python int.

    Raises:
        TypeError: it is none; True and False are not numbers.
    """
    if isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", "") == "b":
        raise TypeError(f"{value!r} is not an integer")
    return operator.index(value)


def number(value: Any) -> float:
    """A real number as a Python float.

    Raises:
        TypeError: it is none; texts, True, False and arrays of several numbers are not numbers.
    """
    if isinstance(value, float):
        return float(value)
    if getattr(value, "shape", None) == () and getattr(value.dtype, "kind", "") in "fV":  # V: bfloat16
        return float(value)
    return float(integer(value))


def checked(name: str, value: Any, kind: type, allowed: Callable[[Any], bool], words: str) -> Any:
    """`value` as an int or a float, whichever `kind` is.

    Raises:
        ValueError: it is no such number, or not `allowed`; `words` say what is.
    """
    try:
        found = integer(value) if kind is int else number(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be {words}; got {value!r:.80}") from None
    if not allowed(found):
        raise ValueError(f"{name} must be {words}; got {value!r:.80}")
    return found
