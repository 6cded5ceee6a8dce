"""The capacity arithmetic, against the numbers worked out by hand."""

import pytest
from support.shapes import LLAMA_8B

from jpaged.runtime.sizing import Sizing, bytes_per_token, kv_bytes_per_token, size_model, weight_bytes

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
