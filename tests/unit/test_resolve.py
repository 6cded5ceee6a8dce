"""What a configuration leaves open is chosen for the model and the memory, and counts all that is allocated."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest
from support.shapes import LLAMA_8B, LLAMA_70B, STUB_MODEL
from support.stubs import HistoryDecoder

from jpaged.config import EngineConfig
from jpaged.runtime import memory, resolve, sizing
from jpaged.runtime.engine import Engine
from jpaged.runtime.footprint import Footprint
from jpaged.runtime.memory import CardMemory, DeviceMemory
from jpaged.runtime.resolve import with_sizes

GB = 10**9
MB = 10**6
CONFIG = EngineConfig(
    page_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_queue=3, dtype="float32", max_model_len=32,
    steps_per_burst=1,
)  # fmt: skip
TEMPORARY = 3 * MB


@pytest.mark.parametrize(
    "changes",
    [{}, {"trace": True, "max_queue": 300}, {"preemption": "swap", "swap_space_bytes": 100_000, "trace": True}],
    ids=["plain", "trace and many rows", "host pool"],
)
def test_the_footprint_is_what_is_allocated(changes):
    """Catches: arrays that no sum counts; those of many rows of long requests took gigabytes beside the pool."""
    before = {id(array) for array in jax.live_arrays()}
    engine = Engine(HistoryDecoder(), (), STUB_MODEL, replace(CONFIG, num_pages=24, **changes))
    footprint = Footprint.of(engine.config, STUB_MODEL)
    assert footprint.on_device == sum(leaf.nbytes for leaf in jax.tree.leaves(engine.state))
    held = [array for array in jax.live_arrays() if id(array) not in before]
    beside = sum(array.nbytes for array in held) - footprint.on_device
    assert beside - footprint.host_pool in range(64)  # a few figures that the host reads
    assert (footprint.host_pool > 0) == ("preemption" in changes)
    assert footprint.requests >= (4 + engine.config.max_queue) * 32 * 4
    engine.close()


def card(monkeypatch, *, limit: int, held: int = 0, total: int = 80 * MB, free: int = 80 * MB):
    """As on a card of `total` bytes of which JAX may take `limit`, has `held` in use, and no process has `free`."""
    monkeypatch.setattr(memory, "device_memory", lambda device: DeviceMemory(limit, held, held))
    monkeypatch.setattr(memory, "card_memory", lambda device: CardMemory(total, free))
    monkeypatch.setattr(memory, "DEVICE_RESERVE_BYTES", 0)


def sized(utilization: float, **changes) -> tuple[EngineConfig, int]:
    """A configuration resolved for that card, and the bytes of all that it allocates there."""
    config = replace(CONFIG, gpu_memory_utilization=utilization, **changes)
    config = resolve.resolve(config, STUB_MODEL, (), lambda config: TEMPORARY)
    return config, Footprint.of(config, STUB_MODEL).on_device + TEMPORARY


@pytest.mark.parametrize("changes", [{}, {"max_queue": 5000}, {"trace": True}, {"preemption": "swap"}])
def test_a_pool_takes_what_everything_else_leaves(monkeypatch, changes):
    """Catches: a pool beside which rows of requests, tables, the prefix index, a trace or the swap tables find no room;
    and a pool that leaves much of a card unused."""
    card(monkeypatch, limit=76 * MB, held=7 * MB)
    config, taken = sized(0.9, **changes)
    assert 0.9 * 80 * MB - 7 * MB - (2 << 20) < taken <= 0.9 * 80 * MB - 7 * MB
    assert config.num_pages and config.max_num_seqs == 4


def test_jax_has_less_than_was_asked_for(monkeypatch):
    """MM-03: JAX's share is less than the utilization, so that is said, and the pool ends where JAX's memory does."""
    card(monkeypatch, limit=60 * MB, held=7 * MB)
    with pytest.warns(RuntimeWarning, match=r"gpu_memory_utilization 0\.9 cannot apply: JAX has started"):
        _, taken = sized(0.9)
    assert taken <= 53 * MB
    _, taken = sized(0.3)  # less than JAX has: nothing to say, and no more is taken
    assert taken <= 0.3 * 80 * MB - 7 * MB


def test_memory_of_another_process_is_not_taken(monkeypatch):
    """U-25."""
    card(monkeypatch, limit=76 * MB, total=100 * MB, free=40 * MB)
    with pytest.warns(RuntimeWarning, match="other processes hold memory of the card"):
        _, taken = sized(0.7)
    assert taken <= 40 * MB


def test_no_room_is_said_by_what_takes_it(monkeypatch):
    """NB-01 on a card: an older engine lives on, or the rows alone are too many; the error says so instead of the
    allocator."""
    card(monkeypatch, limit=76 * MB, held=71 * MB)
    with pytest.raises(ValueError, match=r"other arrays 71,000,000; an older engine gives its memory back"):
        sized(0.9)
    card(monkeypatch, limit=76 * MB)
    with pytest.raises(ValueError, match=r"requests and pages \d\d\d,\d+,\d+ .* lower max_model_len"):
        sized(0.9, max_queue=1_000_000)


def chosen(model, gigabytes: int | None, **given) -> tuple[int, int, int]:
    config = EngineConfig(dtype="bfloat16", **given).for_platform("gpu")
    weights = sizing.weight_bytes(model, "bfloat16")
    total = None if gigabytes is None else gigabytes << 30
    config = with_sizes(config, model, model.max_position_embeddings, total, weights)
    return config.max_num_seqs, config.max_num_batched_tokens, config.max_queue


def test_sizes_of_a_step_on_cards():
    """Catches: a default that is the same on every card; rows or logits that take a large part of a small one; a size
    that was given and is not kept."""
    assert chosen(LLAMA_8B, 141) == (1024, 16_384, 1024)
    slots, tokens, queue = chosen(LLAMA_8B, 24)
    assert (slots, tokens, queue) == (256, 8192, 256)  # 9.7 GB are left: 74,000 tokens
    assert 4 * (slots + queue) * LLAMA_8B.max_position_embeddings < 0.02 * (24 << 30)
    assert chosen(LLAMA_70B, 80)[0] == 8  # which does not fit: the pool says so
    assert chosen(LLAMA_8B, None) == (256, 8192, 256)
    assert chosen(LLAMA_8B, 141, max_num_seqs=3, max_queue=5) == (3, 16_384, 5)
    assert chosen(LLAMA_8B, 141, max_num_batched_tokens=64) == (64, 64, 64)


def test_the_default_pool_of_a_cpu(monkeypatch):
    """Catches: a pool and rows that together take more than the share of the memory that is stated; and a pool of
    another size than 1 GiB where there is plenty."""
    wide = replace(STUB_MODEL, num_heads=64, num_kv_heads=64, head_dim=128, max_position_embeddings=32)

    def on_device(available: int, max_queue: int) -> Footprint:
        monkeypatch.setattr(memory, "available_memory_bytes", lambda: available)
        return Footprint.of(resolve.resolve(replace(CONFIG, max_queue=max_queue), wide, (), lambda config: 0), wide)

    page = CONFIG.page_size * sizing.bytes_per_token(wide, "float32")
    assert (1 << 30) - page <= on_device(64 << 30, 3).pool <= 1 << 30
    assert 0.99 * (1 << 29) < on_device(2 << 30, 100_000).on_device <= 1 << 29
    with pytest.raises(ValueError, match=r"what the engine keeps of requests and pages takes .* or give num_pages"):
        on_device(40 * MB, 100_000)
