"""The cases that every CI run interprets take every path of the GPU kernels, on every card."""

from __future__ import annotations

import pytest
from support.kernel_paths import paths

from pallas_kernels.paged_attention.cases import _CORE, CASES

#: Paths that the other generation's tensor cores have.
_NEVER = {
    "a100": set(),
    "h100": {f"outputs written {columns} columns at a time" for columns in (16, 32)},
    "b200": {"two warpgroups share a tile"},
}


@pytest.mark.parametrize("card", _NEVER)
def test_every_path_has_a_core_case(card):
    """Catches: a path of a kernel that only the whole list takes, and so no CI run; one that no case takes at all."""
    every, core = set(), set()
    for case in CASES.values():
        found = paths(case, card)
        every |= set(found)
        core |= {path for path, taken in found.items() if taken and case.core}
    assert every - core == _NEVER[card]


def test_core_cases_are_cases():
    """Catches: a case that is renamed, and no longer one of the core."""
    assert set(_CORE) == {name for name, case in CASES.items() if case.core}
