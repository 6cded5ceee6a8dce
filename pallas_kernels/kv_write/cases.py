"""Shapes of `kv_write` that tests and benchmarks run, one list for both."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call of `kv_write`: token `t` goes to slot `start + t` of a request whose pages lie in a mixed order."""

    name: str
    tokens: int
    start: int = 0
    padding: int = 0  # tokens that go to the scratch page
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16


CASES = {
    case.name: case
    for case in (
        *(Case(f"page{page}", tokens=2 * page + 1, start=page - 1, page_size=page) for page in (1, 4, 16, 64, 128)),
        *(Case(f"head_dim{size}", tokens=20, head_dim=size) for size in (64, 80, 128)),
        *(Case(f"kv_heads{heads}", tokens=20, kv_heads=heads) for heads in (1, 3, 8)),
        Case("one", tokens=1, start=15),
        Case("padding", tokens=3, start=14, padding=5),
        Case("only-padding", tokens=0, padding=8),
    )
}

#: A step of Llama 3.1 8B.
BENCHMARKS = {
    case.name: case
    for case in (
        Case("serve-decode", tokens=64, kv_heads=8, head_dim=128),
        Case("serve-mixed", tokens=256, kv_heads=8, head_dim=128),
    )
}
