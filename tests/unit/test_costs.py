"""The cost model: its numbers of a model, and which of computing and reading decides."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from support.shapes import LLAMA_8B, QWEN_HALF_B

from jpaged.runtime.costs import MACHINES, CostModel, Machine

SLOW = CostModel(Machine("slow", 100.0, 10.0, 4.0, 0.5), 20, 8.0, 2.0, 3)


def test_a_step_takes_what_takes_longer_of_computing_and_reading():
    """Catches: a sum in place of a maximum, the call's time left out, flops and bytes mixed up."""
    for (tokens, keys, pairs), seconds in {
        (1, 0, 0): 0.5 + 20 / 10,
        (1, 10, 1): 0.5 + (20 + 30) / 10,
        (100, 10, 0): 0.5 + 800 / 100,
        (1, 10, 500): 0.5 + (8 + 1000) / 100,
    }.items():
        given = (jnp.float32(number) for number in (tokens, keys, pairs))
        assert float(SLOW.step(*given)) == pytest.approx(seconds)
    assert SLOW.recompute_token() == 8 / 100
    assert SLOW.move_page(16) == 16 * 3 / 4


def test_costs_of_a_model_are_of_what_a_step_touches():
    """Catches: a table of embeddings that is multiplied with, heads of queries counted for keys, bytes of another
    dtype. By hand for Llama 3.1 8B: 8.03e9 parameters, 0.525e9 of them the table."""
    costs = CostModel.of(LLAMA_8B, "bfloat16", MACHINES["h200"])
    assert costs.weight_bytes == 2 * (8_030_261_248 - 128_256 * 4096)
    assert costs.flops_per_token == costs.weight_bytes  # 2 operations, 2 bytes
    assert costs.bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert costs.flops_per_key == 32 * 32 * 128 * 4
    # a step of one token reads the weights, in 3.1 ms
    alone = float(costs.step(jnp.float32(1), jnp.float32(100), jnp.float32(100)))
    assert alone == pytest.approx(2e-4 + 15.01e9 / 4.8e12, rel=1e-3)
    tied = CostModel.of(QWEN_HALF_B, "float32", MACHINES["cpu"])
    assert tied.weight_bytes == 4 * QWEN_HALF_B.num_parameters


@pytest.mark.parametrize("name", MACHINES)
def test_machines_are_possible(name):
    """Catches: units that are a thousand times off."""
    machine = MACHINES[name]
    assert machine.name == name
    assert 1e11 < machine.flops_per_s < 1e16 and 1e10 < machine.bytes_per_s < 1e13
    assert 1e9 < machine.bus_bytes_per_s < machine.bytes_per_s and 1e-5 < machine.call_s < 1e-2
