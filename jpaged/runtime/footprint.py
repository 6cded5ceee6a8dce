"""What an engine allocates, by what it is for, before any of it is allocated."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.config import EngineConfig
from jpaged.models.spec import ModelConfig
from jpaged.pool import CHUNK_PAGES
from jpaged.step import EngineState, make_state


def pool_shape(model: ModelConfig) -> dict[str, int]:
    """What `make_state` reads of a model."""
    return {"layers": model.num_layers, "kv_heads": model.num_kv_heads, "head_dim": model.head_dim}


def empty_state(config: EngineConfig, model: ModelConfig) -> EngineState:
    """The state of an engine without requests. `config` has nothing left open."""
    return make_state(config, **pool_shape(model), dtype=jnp.dtype(config.pool_dtype))


@dataclass(frozen=True)
class Footprint:
    """Bytes of an engine's arrays. All but `host_pool` are on the device, in `EngineState`."""

    pool: int  # keys and values
    requests: int  # tokens, sampling parameters and hashes of each row
    page_tables: int  # with the rest of the slots, and a bit for each slot and page
    prefixes: int  # the index of pages that can be found, and reference counts
    record: int  # what a step did, with its decisions where a trace is kept; and counters
    swap: int  # which chunks of the host's pool are whose
    host_pool: int  # of the host's memory

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig) -> Footprint:
        """Of an engine of `config`, which has nothing left open. Nothing is allocated."""
        state = jax.eval_shape(partial(empty_state, config, model))
        pool, chunks = _bytes(state.pool), 0 if state.swap is None else state.swap.num_chunks
        return cls(
            pool=pool,
            requests=_bytes(state.requests),
            page_tables=_bytes((state.slots, state.holders)),
            prefixes=_bytes((state.prefixes, state.refcount)),
            record=_bytes((state.record, state.counters)),
            swap=_bytes(state.swap),
            host_pool=chunks * CHUNK_PAGES * pool // (1 + state.pool.num_pages),
        )

    @property
    def on_device(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self)) - self.host_pool

    @property
    def beside_pool(self) -> int:
        """Bytes on the device that hold no keys and values."""
        return self.on_device - self.pool

    def __str__(self) -> str:
        parts = ((f.name.replace("_", " "), getattr(self, f.name)) for f in fields(self))
        return ", ".join(f"{name} {count:,}" for name, count in parts if count)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
