"""The capacity arithmetic, against the numbers worked out by hand and against devices that say little."""

from types import SimpleNamespace

import pytest
from support.shapes import LLAMA_8B

from jpaged.runtime import sizing
from jpaged.runtime.sizing import (
    DEFAULT_CPU_POOL_BYTES,
    DEVICE_RESERVE_BYTES,
    Sizing,
    attainable_bytes,
    available_memory_bytes,
    bytes_per_token,
    card_memory_bytes,
    default_pool_bytes,
    device_memory_bytes,
    kv_bytes_per_token,
    size_model,
    weight_bytes,
)

#: the definition of 80 GB under which the numbers of the next test hold; 80 GiB gives 467,280 tokens
CARD_80_GB = 80 * 10**9


def llama_sizing(**changes) -> Sizing:
    settings = {"memory_bytes": CARD_80_GB, "utilization": 0.9, "dtype": "bfloat16", "page_size": 16}
    return size_model(LLAMA_8B, **{**settings, **changes})


def test_an_80_gb_card_with_llama_8b():
    assert LLAMA_8B.num_parameters == 8_030_261_248
    assert bytes_per_token(LLAMA_8B, "bfloat16") == 131_072
    sizing = llama_sizing()
    assert sizing.num_tokens == 426_784
    assert sizing.requests_reserved(131_072) == 3
    assert sizing.requests_reserved(8_192) == 52
    assert sizing.requests_paged(2_000) == 213


def test_bytes_are_exact():
    sizing = llama_sizing(temporary_bytes=123_456_789)
    assert sizing.usable_bytes == 72_000_000_000  # 0.9 is nine tenths, not the float beside it
    assert sizing.weight_bytes == weight_bytes(LLAMA_8B, "bfloat16") == 16_060_522_496
    assert sizing.free_bytes == 72_000_000_000 - 16_060_522_496 - 123_456_789
    assert sizing.page_bytes == 16 * 131_072
    assert sizing.pool_bytes <= sizing.free_bytes < sizing.pool_bytes + sizing.page_bytes
    huge = Sizing(10**30 + 7, 0.1, 0, 0, 1, 1)
    assert huge.num_tokens == 10**29  # far beyond what a float holds


def test_the_scratch_page_is_taken_from_the_pool():
    assert llama_sizing(scratch_pages=1).num_pages == llama_sizing().num_pages - 1
    assert llama_sizing(scratch_pages=1).pool_bytes == llama_sizing().pool_bytes


def test_paged_requests_round_up_to_pages():
    sizing = Sizing(1000, 1.0, 0, 0, 1, 10)  # 100 pages of 10 tokens
    assert [sizing.requests_paged(n) for n in (1, 10, 11, 20, 1001)] == [100, 100, 50, 50, 0]
    assert [sizing.requests_reserved(n) for n in (1, 10, 11, 1001)] == [1000, 100, 90, 0]


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_bytes_of_a_token(dtype, size):
    assert kv_bytes_per_token(layers=30, kv_heads=3, head_dim=64, dtype=dtype) == 2 * 30 * 3 * 64 * size


def test_the_table_shows_every_number_and_its_unit():
    text = llama_sizing().table(reserved=(131_072, 8_192), average_length=2_000)
    for number in ("80,000,000,000", "72,000,000,000", "16,060,522,496", "426,784", "26,674", "131,072"):
        assert number in text
    lines = text.splitlines()
    assert [line.split()[-2:] for line in lines[-3:]] == [
        ["3", "requests"],
        ["52", "requests"],
        ["213", "requests"],
    ]
    assert str(llama_sizing()) == "\n".join(llama_sizing().table().splitlines())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory_bytes": 0}, "memory_bytes must be an integer of at least 1, got 0"),
        ({"memory_bytes": 80e9}, "memory_bytes must be an integer"),
        ({"utilization": 0.0}, r"utilization must be in \(0, 1\], got 0.0"),
        ({"utilization": 1.1}, r"utilization must be in \(0, 1\], got 1.1"),
        ({"utilization": float("nan")}, r"utilization must be in \(0, 1\], got nan"),
        ({"page_size": 0}, "page_size must be an integer of at least 1"),
        ({"dtype": "int3"}, "dtype must be one of .*got 'int3'"),
        ({"temporary_bytes": -1}, "temporary_bytes must be an integer of at least 0"),
        ({"memory_bytes": 16 * 10**9}, "no room for a single page: 16,062,619,648 bytes are needed"),
    ],
)
def test_bad_numbers_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        llama_sizing(**change)


def test_bad_lengths_are_named():
    with pytest.raises(ValueError, match="length must be"):
        llama_sizing().requests_reserved(0)
    with pytest.raises(ValueError, match="average_length must be"):
        llama_sizing().requests_paged(-5)


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
        ({"bytes_limit": 63_000_000_000}, (63_000_000_000, 0)),
        ({"bytes_limit": 63_000_000_000, "bytes_in_use": 7}, (63_000_000_000, 7)),
    ],
)
def test_a_device_may_not_say_what_it_has(answer, expected):
    """MM-02."""
    assert device_memory_bytes(Device(answer)) == expected


def test_a_fault_that_is_no_answer_is_not_hidden():
    with pytest.raises(KeyError):
        device_memory_bytes(Device(KeyError("a bug")))


def attainable(limit: int, utilization: float, environ: dict[str, str] | None = None, card: int | None = None) -> int:
    return attainable_bytes(limit, utilization, card_bytes=card, environ=environ or {})


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


class Driver:
    """libcuda of a machine with one card. JAX's device 1 is one it does not have."""

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, card, ordinal):
        card._obj.value = 40 + ordinal.value
        return 0 if ordinal.value == 0 else 101

    def cuDeviceTotalMem_v2(self, total, card):
        assert card.value == 40
        total._obj.value = 151 * 10**9
        return 0


def test_the_driver_tells_the_memory_of_a_card(monkeypatch):
    monkeypatch.setattr(sizing.ctypes, "CDLL", {"libcuda.so.1": Driver()}.__getitem__)
    assert card_memory_bytes(SimpleNamespace(local_hardware_id=0)) == 151 * 10**9
    assert card_memory_bytes(SimpleNamespace(local_hardware_id=1)) is None

    def no_driver(name):
        raise OSError(name)

    monkeypatch.setattr(sizing.ctypes, "CDLL", no_driver)
    assert card_memory_bytes(SimpleNamespace(local_hardware_id=0)) is None


def test_the_default_pool_of_a_cpu():
    assert default_pool_bytes(64 << 30) == DEFAULT_CPU_POOL_BYTES == 1 << 30
    assert default_pool_bytes(2 << 30) == 512 << 20
    assert 0 < default_pool_bytes() <= DEFAULT_CPU_POOL_BYTES


def files(**content):
    def read(path):
        name = path.rsplit("/", 1)[1].replace(".", "_")
        if name not in content:
            raise FileNotFoundError(path)
        return content[name]

    return read


def test_available_memory_is_the_least_of_what_the_system_says():
    meminfo = "MemTotal: 8000 kB\nMemAvailable:    4000 kB\n"
    assert available_memory_bytes(files(meminfo=meminfo)) == 4000 * 1024
    assert available_memory_bytes(files(meminfo=meminfo, memory_max="max\n")) == 4000 * 1024
    in_a_group = files(meminfo=meminfo, memory_max="3000000\n", memory_current="1000000\n")
    assert available_memory_bytes(in_a_group) == 2_000_000
    overdrawn = files(meminfo=meminfo, memory_max="1000\n", memory_current="2000\n")
    assert available_memory_bytes(overdrawn) == 0
