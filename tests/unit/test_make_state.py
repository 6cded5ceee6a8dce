"""Making a state: one program, a buffer for each array, and no more memory than the arrays take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from jax.sharding import SingleDeviceSharding
from support.stubs import STUB_SHAPE

from jpaged.config import EngineConfig
from jpaged.policy import by_priority, first_come_first_served
from jpaged.step import make_state
from jpaged.step.init import _program

CONFIG = EngineConfig(page_size=4, num_pages=9, max_num_seqs=2, max_queue=2, max_num_batched_tokens=8, max_model_len=16)
MEMORY_PEAK = Path(__file__).parents[1] / "support" / "memory_peak.py"


def test_every_array_has_a_buffer_of_its_own():
    """Catches: equal constants that share one buffer, which is then donated twice; U-01."""
    swap = {"preemption": "swap", "swap_space_bytes": 1 << 20}
    state = make_state(replace(CONFIG, trace=True, **swap), **STUB_SHAPE)
    leaves = [leaf for leaf in jax.tree.leaves(state) if leaf.size]
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    given_on = jax.jit(lambda state: state, donate_argnums=0)(state)
    assert all(leaf.is_deleted() for leaf in leaves)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given_on))


def test_a_state_is_made_with_the_shardings_asked_for():
    """Catches: a pool that is made whole on one device before it is split."""
    here = SingleDeviceSharding(jax.devices()[0])
    shape = jax.eval_shape(lambda: make_state(CONFIG, **STUB_SHAPE))
    state = make_state(CONFIG, **STUB_SHAPE, shardings=jax.tree.map(lambda _: here, shape))
    assert all(leaf.committed and leaf.sharding == here for leaf in jax.tree.leaves(state))
    assert jax.tree.map(lambda leaf: leaf.shape, state) == jax.tree.map(lambda leaf: leaf.shape, shape)


def test_what_no_array_depends_on_compiles_nothing():
    """Catches: a program for each seed or list of budgets; and one made for another policy or another switch."""
    make_state(CONFIG, **STUB_SHAPE)
    programs = _program.cache_info().currsize
    make_state(replace(CONFIG, seed=5, token_budgets=(2, 8), steps_per_burst=3), **STUB_SHAPE)
    assert _program.cache_info().currsize == programs
    other = make_state(replace(CONFIG, admission=first_come_first_served, enable_prefix_caching=False), **STUB_SHAPE)
    assert (other.admission, other.victim) == (first_come_first_served, by_priority)
    assert not other.prefixes.enabled


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell the peak in this way")
def test_an_engine_needs_no_more_memory_than_its_state():
    """Catches U-01: arrays that live beside their copies while an engine is made, or made again after a failed burst.
    A process of its own, and another engine first, so that the peak is the arrays' alone."""
    # Compiled as users compile it: by the older emitters, which other unit tests take, it needs twice its outputs.
    quick = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    environment = {name: value for name, value in os.environ.items() if name not in quick}
    command = [sys.executable, str(MEMORY_PEAK), "8192"]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    seen = json.loads(run.stdout)
    assert seen["state"] > 256 << 20
    assert seen["made"] - seen["before"] < 1.1 * seen["state"], seen
    assert seen["made_again"] - seen["before"] < 1.1 * seen["state"], seen
