"""Compiled programs are shared by engines of equal shapes, and go with the last of them."""

from __future__ import annotations

import gc
from dataclasses import replace
from weakref import WeakValueDictionary

import jax
from support.stories import MODEL, READER, TIGHT

from jpaged.request import Request, SamplingParams
from jpaged.runtime.engine import Engine
from jpaged.runtime.programs import Programs

PLAIN = replace(TIGHT, trace=False, preemption="recompute", swap_space_bytes=None, num_pages=17)


def live() -> int:
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


def used(**changes) -> Engine:
    engine = Engine(READER, (), MODEL, replace(PLAIN, **changes))
    engine.submit(Request("a", (1, 2, 3), SamplingParams(temperature=0, max_tokens=3)))
    while engine.has_work:
        engine.burst()
    return engine


def test_programs_go_with_the_last_engine_that_uses_them(monkeypatch):
    """U-14. Catches: a cache of a module, or of JAX, that keeps what a closed engine compiled: 65 MB each."""
    monkeypatch.setattr(Programs, "shared", WeakValueDictionary())
    used(num_pages=16).close()  # what is compiled once in a process
    before = live()
    one, other = used(), used()
    assert len(Programs.shared) == 1 and live() >= before + one.num_programs
    assert other.num_programs == one.num_programs and other.compile_seconds < one.compile_seconds
    one.close()
    assert live() >= before + other.num_programs
    other.close()
    assert len(Programs.shared) == 0
    # The empty state's program is kept: those of the last 32 sizes.
    assert live() <= before + 1
