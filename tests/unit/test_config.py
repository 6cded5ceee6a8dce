"""EngineConfig refuses what cannot work, by name, before anything is compiled."""

from __future__ import annotations

import dataclasses

import pytest

from jpaged.config import EngineConfig


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"page_size": 0}, "page_size must be an integer of at least 1, got 0"),
        ({"page_size": 16.0}, "page_size must be an integer"),
        ({"page_size": True}, "page_size must be an integer of at least 1, got True"),
        ({"num_pages": 0}, "num_pages must be an integer of at least 1 or None, got 0"),
        ({"pool_bytes": -1}, "pool_bytes must be"),
        ({"num_pages": 4, "pool_bytes": 4096}, r"give num_pages \(4\) or pool_bytes \(4096\), not both"),
        ({"max_num_seqs": 0}, "max_num_seqs must be"),
        ({"max_num_batched_tokens": "256"}, "max_num_batched_tokens must be an integer of at least 1 or None, got"),
        ({"max_model_len": 0}, "max_model_len must be"),
        ({"max_queue": 0}, "max_queue must be"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be 'auto' or one of .* got 'fp8'"),
        ({"dtype": "int8"}, "dtype must be 'auto' or one of .* got 'int8'"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"gpu_memory_utilization": 0.0}, r"gpu_memory_utilization must be in \(0, 1\], got 0.0"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
        ({"token_budgets": ()}, "token_budgets must be increasing counts"),
        ({"token_budgets": (64, 8, 256)}, "token_budgets must be increasing counts"),
        ({"token_budgets": (0, 256)}, "token_budgets must be increasing counts"),
        (
            {"token_budgets": (8, 64), "max_num_batched_tokens": 256},
            r"the last of token_budgets \(64\) must be max_num_batched_tokens \(256\)",
        ),
    ],
)
def test_impossible_values_are_named(fields, words):
    """Catches: a size that fails inside a compiled program, or is silently rounded."""
    with pytest.raises(ValueError, match=words):
        EngineConfig(**fields)


@pytest.mark.parametrize(
    ("most", "budgets"),
    [
        (256, (1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)),
        (317, (1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 317)),
        (8, (1, 4, 8)),
        (9, (1, 4, 8, 9)),
        (2, (1, 2)),
        (1, (1,)),
    ],
)
def test_budgets_end_at_the_limit(most, budgets):
    """JX-01: a limit that is none of the usual sizes is a size of its own, not cut to one."""
    assert EngineConfig(max_num_batched_tokens=most).budgets == budgets


def test_given_budgets_are_kept_and_hashable():
    config = EngineConfig(token_budgets=[8, 100], max_num_batched_tokens=100)
    assert config.budgets == (8, 100)
    assert hash(config) == hash(EngineConfig(token_budgets=(8, 100), max_num_batched_tokens=100))


@pytest.mark.parametrize(("length", "pages"), [(1, 1), (15, 1), (16, 1), (17, 2), (160, 10)])
def test_a_table_has_a_column_for_every_begun_page(length, pages):
    assert EngineConfig(max_model_len=length).max_pages_per_seq == pages


def test_open_sizes_are_not_guessed():
    with pytest.raises(ValueError, match="max_model_len is not set yet"):
        _ = EngineConfig().max_pages_per_seq
    with pytest.raises(ValueError, match="max_num_batched_tokens is not set yet"):
        _ = EngineConfig().budgets


def test_sizes_of_a_step_on_a_cpu():
    """Catches: a default that contradicts a size that was given: steps with fewer tokens than slots."""
    sizes = [
        (c.max_num_seqs, c.max_num_batched_tokens, c.max_queue)
        for given in (
            {}, {"max_num_seqs": 4}, {"max_num_seqs": 300}, {"max_num_batched_tokens": 16}, {"token_budgets": (4, 32)},
        )
        for c in [EngineConfig(**given).for_platform("cpu")]
    ]  # fmt: skip
    assert sizes == [(64, 256, 64), (4, 256, 64), (300, 300, 300), (16, 16, 64), (32, 32, 64)]
    assert EngineConfig().for_platform("gpu").max_num_seqs is None


def test_it_cannot_be_changed():
    """Catches: configuration that changes under a compiled program."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().page_size = 4


def test_the_pool_has_the_dtype_of_the_weights_unless_it_is_given_its_own():
    """Catches: one field for both."""
    assert EngineConfig(dtype="float16").pool_dtype == "float16"
    config = EngineConfig(dtype="float32", kv_cache_dtype="bfloat16")
    assert (config.for_platform("cpu").dtype, config.for_platform("cpu").pool_dtype) == ("float32", "bfloat16")
