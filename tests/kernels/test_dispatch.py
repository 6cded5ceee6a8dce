"""Choosing an implementation: by name and platform, without silent substitutes."""

from __future__ import annotations

import jax
import pytest

from pallas_kernels.dispatch import Implementation, choose


def fast():
    """Stands for a GPU kernel."""


def plain():
    """Stands for XLA operations."""


def picky():
    """Stands for a kernel with needs of its own."""


def wants_even(operand: int) -> str | None:
    return f"it wants even numbers, and this is {operand}" if operand % 2 else None


BOTH = (Implementation("mosaic", fast, ("gpu",)), Implementation("xla", plain))


def test_auto_takes_the_first_that_runs_here():
    assert choose("op", BOTH, "auto", "gpu") is fast
    assert choose("op", BOTH, "auto", "cpu") is plain
    assert choose("op", BOTH) is (fast if jax.default_backend() == "gpu" else plain)


def test_a_name_is_obeyed():
    """Catches: a faster implementation taken although another was asked for."""
    assert choose("op", BOTH, "xla", "gpu") is plain
    assert choose("op", BOTH, "mosaic", "gpu") is fast


def test_a_named_one_that_cannot_run_here_is_an_error_that_names_both_platforms():
    """JX-06. Catches: a quiet fallback, or a lowering trace as the first sign."""
    with pytest.raises(ValueError, match="op: implementation 'mosaic' runs on gpu, but the platform here is cpu"):
        choose("op", BOTH, "mosaic", "cpu")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="no implementation 'triton' for cpu; there are 'auto', 'mosaic', 'xla'"):
        choose("op", BOTH, "triton", "cpu")


def test_auto_without_any_is_an_error():
    with pytest.raises(ValueError, match="no implementation 'auto' for cpu"):
        choose("op", BOTH[:1], "auto", "cpu")


def test_one_that_lacks_something_says_what(caplog):
    """JX-06. Catches: a kernel that is given operands it cannot compute; a fallback that nobody hears of."""
    both = (Implementation("picky", picky, ("cpu",), wants_even), Implementation("xla", plain))
    assert choose("op", both, "picky", "cpu", (2,)) is choose("op", both, "auto", "cpu", (2,)) is picky
    with pytest.raises(ValueError, match="op: implementation 'picky' cannot, for it wants even numbers, and this is 3"):
        choose("op", both, "picky", "cpu", (3,))
    assert not caplog.messages
    for _ in range(2):
        assert choose("op", both, "auto", "cpu", (5,)) is plain
    assert caplog.messages == ["op: 'xla' runs; 'picky' cannot, for it wants even numbers, and this is 5"]
    assert choose("op", both, "auto", "gpu", (7,)) is plain  # not its platform: nothing to be said
    assert len(caplog.messages) == 1
    with pytest.raises(ValueError, match=r"no implementation 'auto' for cpu.*wants even numbers, and this is 9"):
        choose("op", both[:1], "auto", "cpu", (9,))
