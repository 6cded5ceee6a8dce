"""The cost model: its numbers of a model, and which of computing and reading decides."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from support.shapes import LLAMA_8B, QWEN_HALF_B

from jpaged.runtime.costs import MACHINES, CostModel, Machine, machine_of

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
    wide = CostModel.of(LLAMA_8B, "bfloat16", MACHINES["h200"], kv_cache_dtype="float32")
    assert (wide.weight_bytes, wide.bytes_per_token) == (costs.weight_bytes, 2 * costs.bytes_per_token)
    tied = CostModel.of(QWEN_HALF_B, "float32", MACHINES["cpu"])
    assert tied.weight_bytes == 4 * QWEN_HALF_B.num_parameters


@pytest.mark.parametrize("name", MACHINES)
def test_machines_are_possible(name):
    """Catches: units that are a thousand times off."""
    machine = MACHINES[name]
    assert machine.name == name
    assert 1e11 < machine.flops_per_s < 1e16 and 1e10 < machine.bytes_per_s < 1e13
    assert 1e9 < machine.bus_bytes_per_s < machine.bytes_per_s and 1e-5 < machine.call_s < 1e-2


def gpu(kind: str, capability: str, cores: int) -> SimpleNamespace:
    """A device as JAX tells of it."""
    return SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability, core_count=cores)


class Driver:
    """The functions of pynvml that are called, of a machine with an L4 and an RTX 4090; `silent` of them are not
    supported."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_MEM = 2

    def __init__(self, *silent: str):
        self.open, cards = 0, ({"Name": "NVIDIA L4", "MemoryBusWidth": 192, "MaxClockInfo": 6251,
                                "MaxPcieLinkGeneration": 4, "MaxPcieLinkWidth": 16},
                               {"Name": "NVIDIA GeForce RTX 4090", "MemoryBusWidth": 384, "MaxClockInfo": 10501,
                                "MaxPcieLinkGeneration": 4, "MaxPcieLinkWidth": 8})  # fmt: skip

        def answer(name):
            def function(card, *_):
                if name in silent:
                    raise self.NVMLError(name)
                return card[name]

            return function

        for name in cards[0]:
            setattr(self, f"nvmlDeviceGet{name}", answer(name))
        self.nvmlDeviceGetCount = lambda: len(cards)
        self.nvmlDeviceGetHandleByIndex = lambda index: cards[index]

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1


def test_a_card_that_is_not_listed_is_what_its_driver_tells(monkeypatch, caplog):
    """`preemption="auto"` on a card of no list. Catches: another card's numbers taken, a clock in the wrong unit, a
    driver that is left open, an estimate that is not mentioned."""
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    caplog.set_level("INFO", "jpaged")
    machine = machine_of(gpu("NVIDIA GeForce RTX 4090", "8.9", 128))
    assert machine.bytes_per_s == pytest.approx(1008e9, rel=1e-3)
    assert machine.bus_bytes_per_s == pytest.approx(12.5e9, rel=0.01)
    assert machine.flops_per_s == pytest.approx(165e12, rel=0.3)
    assert driver.open == 0
    [record] = caplog.records
    assert record.levelname == "INFO"
    assert "1008 GB/s of memory" in record.message and "capability 8.9: its rate of products" in record.message


def test_without_a_driver_a_card_is_estimated_and_it_is_said(monkeypatch, caplog):
    """Catches: an engine that does not start because the driver's library is missing, or does not know a number."""
    for driver in (None, Driver("MemoryBusWidth", "MaxPcieLinkWidth")):
        caplog.clear()
        monkeypatch.setitem(sys.modules, "pynvml", driver)  # None: the import fails
        machine = machine_of(gpu("NVIDIA L4", "8.9", 58))
        assert machine.bytes_per_s == pytest.approx(300e9, rel=0.5)
        assert machine.flops_per_s == pytest.approx(121e12, rel=0.3)
        [record] = caplog.records
        assert record.levelname == "WARNING" and "its memory's bandwidth, its bus" in record.message


def test_a_listed_card_is_its_data_sheet_and_another_device_an_error():
    assert machine_of(gpu("NVIDIA H100 80GB HBM3", "9.0", 132)) is MACHINES["h100"]
    assert machine_of(SimpleNamespace(platform="cpu")) is MACHINES["cpu"]
    with pytest.raises(ValueError, match="'TPU v5e' is neither: give swap_page_cost"):
        machine_of(SimpleNamespace(platform="tpu", device_kind="TPU v5e"))
