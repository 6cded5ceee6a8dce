"""An empty engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.config import EngineConfig
from jpaged.pool import CHUNK_PAGES, SCRATCH_PAGE, KVPool
from jpaged.step.decisions import Decisions
from jpaged.step.record import Counters, StepRecord
from jpaged.step.sampling.params import Sampling
from jpaged.step.sharing.index import LOOKUP_PAGES, Prefixes
from jpaged.step.state import EngineState, Requests, Slots
from jpaged.step.status import NO_REQUEST
from jpaged.step.swap.table import Swap

#: Programs of `make_state` that are kept, so that a process that makes many small states compiles each once.
_MOST_PROGRAMS = 32


def make_state(
    config: EngineConfig,
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: Any = jnp.float32,
    shardings: Any = None,
) -> EngineState:
    """An empty engine. `config` must have all sizes: `num_pages`, `max_model_len`, `max_num_seqs` and `max_queue`.

    One compiled program without inputs writes all arrays where they stay, so that the memory taken is that of the
    state. Every array has a buffer of its own, as donating the state needs. Inside `jax.eval_shape` it gives shapes.

    Args:
        layers, kv_heads, head_dim: of the model whose keys and values the pool holds.
        dtype: of the pool.
        shardings: of the arrays, a tree like the state (see `jpaged.parallel.rules.state_shardings`); None: all on the
            default device.

    Raises:
        ValueError: where a size is not set, or where the pool cannot hold one request of `max_model_len`, or the host's
            pool not one chunk.
    """
    needed = ("num_pages", "max_model_len", "max_num_seqs", "max_queue")
    if missing := [name for name in needed if getattr(config, name) is None]:
        raise ValueError(f"make_state chooses no sizes, as LLM and Engine do: give {', '.join(missing)}")
    if config.max_pages_per_seq > (config.num_pages or 0):
        raise ValueError(
            f"a request of max_model_len {config.max_model_len} needs {config.max_pages_per_seq} pages of "
            f"{config.page_size} tokens, but the pool has {config.num_pages}; lower max_model_len or raise num_pages"
        )
    # Without what no array depends on, so that configurations that differ in it have one program.
    sizes = replace(
        config, seed=0, token_budgets=None, steps_per_burst=None, async_scheduling=None, pool_bytes=None,
        gpu_memory_utilization=1.0, dtype="auto", compilation_cache=True,
        max_num_batched_tokens=config.max_num_batched_tokens if config.trace else 1,
    )  # fmt: skip
    make = partial(_arrays, sizes, layers, kv_heads, head_dim, jnp.dtype(dtype))
    return _program(*make.args)() if shardings is None else jax.jit(make, out_shardings=shardings)()


@lru_cache(_MOST_PROGRAMS)
def _program(*arguments: Any) -> Callable[[], EngineState]:
    return jax.jit(partial(_arrays, *arguments))


def _arrays(config: EngineConfig, layers: int, kv_heads: int, head_dim: int, dtype: Any) -> EngineState:
    assert config.num_pages is not None and config.max_model_len is not None
    slots, rows = config.max_num_seqs, config.max_num_seqs + config.max_queue
    pages = config.max_pages_per_seq
    row_ints, slot_ints, count = jnp.zeros(rows, jnp.int32), jnp.zeros(slots, jnp.int32), jnp.uint32(0)
    requests = Requests(
        status=row_ints, uid=jnp.full(rows, NO_REQUEST, jnp.int32), arrival=row_ints, priority=row_ints,
        tokens=jnp.zeros((rows, config.max_model_len), jnp.int32),
        num_tokens=row_ints, num_prompt_tokens=row_ints, sampling=Sampling.empty(rows, numpy=jnp), namespace=row_ints,
        prefix_hash=jnp.zeros((rows, pages, 2), jnp.uint32), cached_tokens=row_ints, preempted=jnp.zeros(rows, bool),
        beam=jnp.zeros(rows, bool), parent=jnp.full(rows, NO_REQUEST, jnp.int32),
    )  # fmt: skip
    pool = KVPool.zeros(
        layers=layers, num_pages=config.num_pages, kv_heads=kv_heads, page_size=config.page_size, head_dim=head_dim,
        dtype=dtype,
    )  # fmt: skip
    swap, decisions = _make_swap(config, CHUNK_PAGES * pool.page_bytes), None
    if config.trace:
        decisions = Decisions.empty(
            slots=slots, columns=pages, num_pages=config.num_pages, page_size=config.page_size,
            most_tokens=config.max_num_batched_tokens, most_restored=0 if swap is None else swap.notes.placed.most,
        )  # fmt: skip
    return EngineState(
        pool=pool,
        holders=jnp.zeros((-(-slots // 32), 1 + config.num_pages), jnp.uint32),
        refcount=jnp.zeros(1 + config.num_pages, jnp.int32).at[SCRATCH_PAGE].set(1),
        prefixes=Prefixes.empty(config.num_pages, config.page_size, enabled=config.enable_prefix_caching),
        slots=Slots(
            occupied=jnp.zeros(slots, bool), request=slot_ints, num_computed_tokens=slot_ints, entered=slot_ints,
            num_pages=slot_ints,
            page_table=jnp.full((slots, pages), SCRATCH_PAGE, jnp.int32),
        ),
        requests=requests,
        counters=Counters(
            submitted=count, steps=count, computed_tokens=count, padded_tokens=count, preemptions=count,
            prefix_queries=count, prefix_hits=count,
        ),
        record=StepRecord.zeros(slots, decisions),
        swap=swap,
        admission=config.admission,
        victim=config.victim,
    )  # fmt: skip


def _make_swap(config: EngineConfig, chunk_bytes: int) -> Swap | None:
    if config.preemption == "recompute":
        return None
    cost = 0.0 if config.preemption == "swap" else config.swap_page_cost
    if config.swap_space_bytes is None or cost is None:
        raise ValueError(
            f"preemption={config.preemption!r} needs swap_space_bytes, and 'auto' swap_page_cost, got "
            f"{config.swap_space_bytes} and {config.swap_page_cost}"
        )
    slots, rows, columns = config.max_num_seqs, config.max_num_seqs + config.max_queue, config.max_pages_per_seq
    chunks = min(config.swap_space_bytes // chunk_bytes, rows * -(-columns // CHUNK_PAGES))
    if chunks == 0:
        raise ValueError(
            f"swap_space_bytes {config.swap_space_bytes:,} hold no {CHUNK_PAGES} pages, which have {chunk_bytes:,} "
            "bytes and are moved together: give that many at least, or preemption='recompute'"
        )
    most_placed = min(slots * columns, 2 * max(columns, LOOKUP_PAGES) + slots) if config.trace else 0
    return Swap.empty(
        chunks=chunks, rows=rows, columns=columns, slots=slots, page_cost=cost,
        most_placed=most_placed,
    )  # fmt: skip
