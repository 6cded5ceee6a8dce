"""The sizes of an engine: what a configuration leaves open is filled in from the model and the device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.config import EngineConfig
from jpaged.models.spec import ModelConfig
from jpaged.pool import CHUNK_PAGES
from jpaged.runtime import costs, sizing
from jpaged.step import EngineState, make_state

logger = logging.getLogger("jpaged")

#: Of the host's pool where its size was left open, as in vLLM.
_MOST_SWAP_BYTES = 4 << 30


def pool_shape(model: ModelConfig) -> dict[str, int]:
    """What `make_state` reads of a model."""
    return {"layers": model.num_layers, "kv_heads": model.num_kv_heads, "head_dim": model.head_dim}


def empty_state(config: EngineConfig, model: ModelConfig) -> EngineState:
    """The state of an engine without requests. `config` has nothing left open."""
    return make_state(config, **pool_shape(model), dtype=jnp.dtype(config.dtype))


def resolve(
    config: EngineConfig, model: ModelConfig, params: Any, temporary_bytes: Callable[[EngineConfig], int]
) -> EngineConfig:
    """`config` with nothing left open.

    Args:
        params: the weights of the model, as they are on the device.
        temporary_bytes: says how many bytes the largest step of an engine of a configuration needs while it runs. Only
            called where the pool is sized from the memory of a device.

    Raises:
        ValueError: for sizes that do not fit each other, the model, or the device.
    """
    config = config.for_platform(jax.default_backend())
    if config.max_model_len is not None and config.max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len {config.max_model_len} is more than the {model.max_position_embeddings} tokens that "
            "the model was made for"
        )
    longest = config.max_model_len or model.max_position_embeddings
    num_pages = config.num_pages
    if num_pages is None:
        sized = replace(config, max_model_len=longest)
        pool_bytes = config.pool_bytes or _pool_bytes(sized, longest, params, temporary_bytes)
        page_bytes = config.page_size * sizing.bytes_per_token(model, config.dtype)
        num_pages = pool_bytes // page_bytes - 1  # one is scratch
        if num_pages < 1:
            raise ValueError(
                f"{pool_bytes} bytes hold {pool_bytes // page_bytes} pages of {page_bytes} bytes; at least 2 are "
                "needed (one is scratch)"
            )
    if config.max_model_len is None and num_pages * config.page_size < longest:
        logger.info(
            "The pool of %d pages holds %d tokens: max_model_len is that, not the model's %d",
            num_pages, num_pages * config.page_size, longest,
        )  # fmt: skip
        longest = num_pages * config.page_size
    config = replace(config, num_pages=num_pages, max_model_len=longest, pool_bytes=None)
    return _with_swap(config, model)


def _with_swap(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """`config` with the size of the host's pool, and what using it costs."""
    if config.preemption == "recompute":
        return config
    page_bytes = config.page_size * sizing.bytes_per_token(model, config.dtype)
    assert config.num_pages is not None
    space = config.swap_space_bytes
    if space is None:
        space = max(CHUNK_PAGES * page_bytes, min(config.num_pages * page_bytes, _MOST_SWAP_BYTES))
    cost = config.swap_page_cost
    if config.preemption == "auto" and cost is None:
        machine = costs.machine_of(jax.devices()[0])
        of_model = costs.CostModel.of(model, config.dtype, machine)
        cost = 2 * of_model.move_page(config.page_size) / of_model.recompute_token()
        logger.info(
            "preemption='auto': on %s, moving a page of %d tokens to the host and back takes as long as computing "
            "%.2f tokens; a request is swapped where that is less than what it would compute again",
            machine.name, config.page_size, cost,
        )  # fmt: skip
    return replace(config, swap_space_bytes=space, swap_page_cost=cost)


def _pool_bytes(config: EngineConfig, longest: int, params: Any, temporary_bytes: Callable[[EngineConfig], int]) -> int:
    """Bytes for the pool when the caller named no size: from the GPU's memory, or the stated CPU default."""
    device = jax.devices()[0]
    memory = sizing.device_memory_bytes(device)
    if memory is None:
        return sizing.default_pool_bytes()
    limit, held = memory
    pages = -(-longest // config.page_size)
    temporary = temporary_bytes(
        replace(config, num_pages=pages, preemption="recompute", swap_space_bytes=None, swap_page_cost=None)
    )
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    total = sizing.attainable_bytes(limit, config.gpu_memory_utilization, card_bytes=sizing.card_memory_bytes(device))
    others = max(0, held - weights)
    left = total - weights - others - temporary
    if left <= 0:
        raise ValueError(
            f"{total:,} bytes of the device can be used (gpu_memory_utilization "
            f"{config.gpu_memory_utilization:g}), but weights take {weights:,}, the compiled step {temporary:,} "
            f"and other arrays {others:,}; an older engine gives its memory back at close()"
        )
    return left
