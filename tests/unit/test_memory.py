"""How much memory there is: against devices, drivers and systems that say little, or that others use as well."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import psutil
import pytest

from jpaged.runtime.memory import (
    DEVICE_RESERVE_BYTES,
    CardMemory,
    DeviceMemory,
    attainable_bytes,
    available_memory_bytes,
    card_memory,
    device_memory,
)

GB = 10**9


class Device:
    def __init__(self, answer):
        self.answer = answer

    def memory_stats(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, None),
        ({}, None),
        ({"bytes_in_use": 5}, None),
        ({"bytes_limit": 0}, None),
        (RuntimeError("UNIMPLEMENTED: memory_stats"), None),
        (AttributeError("memory_stats"), None),
        ({"bytes_limit": 63_000_000_000}, DeviceMemory(63_000_000_000, 0, 0)),
        ({"bytes_limit": 63_000_000_000, "bytes_in_use": 7}, DeviceMemory(63_000_000_000, 7, 7)),
        ({"bytes_limit": 63_000_000_000, "bytes_in_use": 7, "pool_bytes": 9}, DeviceMemory(63_000_000_000, 7, 9)),
    ],
)
def test_a_device_may_not_say_what_it_has(answer, expected):
    """MM-02."""
    assert device_memory(Device(answer)) == expected


def test_a_fault_that_is_no_answer_is_not_hidden():
    with pytest.raises(KeyError):
        device_memory(Device(KeyError("a bug")))


def attainable(limit: int, utilization: float, environ: dict[str, str] | None = None, card: int | None = None) -> int:
    told = None if card is None else CardMemory(card, card)
    return attainable_bytes(DeviceMemory(limit, 0, 0), utilization, card=told, environ=environ or {})


def test_utilization_speaks_of_the_card():
    limit = 60 * 10**9  # three quarters of an 80 GB card
    assert attainable(limit, 0.5) == 40 * 10**9
    assert attainable(limit, 0.75) == limit - DEVICE_RESERVE_BYTES
    assert attainable(76 * 10**9, 0.9, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".95"}) == 72 * 10**9
    assert attainable(limit, 0.5, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "2.0"}) == 30 * 10**9
    assert attainable(1, 0.5) == 0
    with pytest.raises(ValueError, match="XLA_PYTHON_CLIENT_MEM_FRACTION must be a number, got 'half'"):
        attainable(limit, 0.9, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "half"})


@pytest.mark.parametrize("fraction", [None, ".95"], ids=["as JAX starts", "set after JAX started"])
def test_a_share_that_jax_did_not_take_is_said_and_not_taken(fraction):
    """MM-03: 0.9 of the card with JAX's three quarters; the variable may say what it likes by now."""
    limit, card = 60 * 10**9, 80 * 10**9
    environ = {"XLA_PYTHON_CLIENT_MEM_FRACTION": fraction} if fraction else {}
    with pytest.warns(RuntimeWarning, match=r"0\.9 cannot apply: JAX has started and took 60,000,000,000 of the 80,"):
        assert attainable(limit, 0.9, environ, card) == limit - DEVICE_RESERVE_BYTES
    assert attainable(limit, 0.5, environ, card) == 40 * 10**9


def test_memory_of_other_processes_is_not_taken():
    """U-25: another process holds 30 of a card's 100 GB. What JAX took from the driver before is still its own."""
    card = CardMemory(total=100 * GB, free=70 * GB)
    with pytest.warns(RuntimeWarning, match=r"other processes hold memory of the card, and of its 100,\S+ bytes 70,"):
        assert attainable_bytes(DeviceMemory(95 * GB, 0, 0), 0.9, card=card) == 70 * GB - DEVICE_RESERVE_BYTES
    jax_took_it = DeviceMemory(limit=75 * GB, in_use=GB, taken=75 * GB)
    assert attainable_bytes(jax_took_it, 0.7, card=CardMemory(100 * GB, 0)) == 70 * GB


class Driver:
    """NVIDIA's driver on a machine with two cards."""

    class NVMLError(Exception):
        pass

    def __init__(self, installed: bool = True):
        self.installed, self.open = installed, 0

    def nvmlInit(self):
        if not self.installed:
            raise self.NVMLError("NVML Shared Library Not Found")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index):
        if index > 1:
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, name):
        return {"GPU-a": 0, "GPU-b": 1}[name]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=(100 + handle) * GB, free=70 * GB)


@pytest.mark.parametrize(
    ("visible", "number", "total"),
    [(None, 1, 101), ("1,0", 0, 101), ("GPU-b", 0, 101), ("1", 1, None), ("7", 0, None), ("", 0, 100)],
)
def test_the_driver_is_asked_for_the_card_that_jax_sees(monkeypatch, visible, number, total):
    """Catches: the memory of another card, where CUDA_VISIBLE_DEVICES leaves some out or names them."""
    monkeypatch.setitem(sys.modules, "pynvml", driver := Driver())
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    told = card_memory(SimpleNamespace(local_hardware_id=number), environ)
    assert told == (None if total is None else CardMemory(total * GB, 70 * GB))
    assert driver.open == 0


def test_without_a_driver_nothing_is_known_of_a_card(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Driver(installed=False))
    assert card_memory(SimpleNamespace(local_hardware_id=0), {}) is None


def test_available_memory_is_the_least_of_what_the_system_says(monkeypatch):
    """Catches: a container whose limit is not seen, since the system tells what the whole machine has."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4_096_000))

    def group(**files):
        def read(path):
            if (name := path.rsplit("/", 1)[1].replace(".", "_")) not in files:
                raise FileNotFoundError(path)
            return files[name]

        return available_memory_bytes(read)

    assert group() == group(memory_max="max\n") == 4_096_000
    assert group(memory_max="3000000\n", memory_current="1000000\n") == 2_000_000
    assert group(memory_max="1000\n", memory_current="2000\n") == 0
