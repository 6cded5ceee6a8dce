"""The sizes of an engine: what a configuration leaves open is chosen for the model and the device.

**Slots, tokens of a step, rows that wait.** On a CPU 64, 256 and 64: of the sizes measured, the products of a step take
the least time a token at 256 (docs/measurements.md). On a GPU vLLM's choice is where it begins: 1,024 slots and steps
of 16,384 tokens on cards of 70 GiB and more, else 256 and 8,192. Each is then halved until it fits the model:

- rows: slots and as many that wait hold `max_model_len` tokens each, with their hashes and page tables. All of that
  takes at most 2 % of the card.
- slots: the logits of a step, a float32 for each slot and token of the vocabulary, take at most 1 %; and the pool
  could hold 256 tokens for each.
- tokens: the largest activation of a step, the two halves of the MLP's inner units, takes at most 2 %.

**The pool** has what is left of the memory that may be used, after weights, temporaries of the largest step, all other
arrays of the engine, and what other arrays and other processes hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax

from jpaged.config import EngineConfig
from jpaged.models.spec import ModelConfig
from jpaged.pool import CHUNK_PAGES
from jpaged.runtime import costs, memory, sizing
from jpaged.runtime.footprint import Footprint

logger = logging.getLogger("jpaged")

#: Of the host's pool where its size was left open, as in vLLM.
_MOST_SWAP_BYTES = 4 << 30
#: vLLM's choices for a card of at least so many bytes: slots, tokens of a step.
_BY_CARD = ((70 << 30, 1024, 16_384), (0, 256, 8192))
#: What these may take of a card.
_ROWS_SHARE, _LOGITS_SHARE, _ACTIVATIONS_SHARE = Fraction(2, 100), Fraction(1, 100), Fraction(2, 100)
#: Tokens that the pool should hold for each slot.
_TOKENS_A_SLOT = 256
_LEAST_SLOTS, _LEAST_TOKENS = 8, 256


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
    asked = config
    config = config.for_platform(jax.default_backend())
    if config.max_model_len is not None and config.max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len {config.max_model_len} is more than the {model.max_position_embeddings} tokens that "
            "the model was made for"
        )
    longest = config.max_model_len or model.max_position_embeddings
    num_pages = config.num_pages
    config = with_sizes(config, model, longest, _card_bytes(), _weights(params))
    if num_pages is None and config.pool_bytes is not None:
        page_bytes = config.page_size * sizing.bytes_per_token(model, config.pool_dtype)
        num_pages = config.pool_bytes // page_bytes - 1  # one is scratch
        if num_pages < 1:
            raise ValueError(
                f"{config.pool_bytes} bytes hold {num_pages + 1} pages of {page_bytes} bytes; at least 2 are needed "
                "(one is scratch)"
            )
    if num_pages is None:
        num_pages = _num_pages(config, longest, model, params, temporary_bytes)
    if config.max_model_len is None and num_pages * config.page_size < longest:
        logger.info(
            "The pool of %d pages holds %d tokens: max_model_len is that, not the model's %d",
            num_pages, num_pages * config.page_size, longest,
        )  # fmt: skip
        longest = num_pages * config.page_size
    config = _with_swap(replace(config, num_pages=num_pages, max_model_len=longest, pool_bytes=None), model)
    _tell(asked, config)
    return config


def with_sizes(
    config: EngineConfig, model: ModelConfig, longest: int, card_bytes: int | None, weights: int
) -> EngineConfig:
    """`config` with slots, tokens of a step and rows that wait, as the head of this module says, for a GPU.

    Args:
        longest: tokens of the longest request.
        card_bytes: of the card's memory; None: unknown, and nothing but the smaller of vLLM's choices is made.
        weights: bytes of the weights.
    """
    slots, tokens, queue = config.max_num_seqs, config.max_num_batched_tokens, config.max_queue
    _, most_slots, most_tokens = next(choice for choice in _BY_CARD if (card_bytes or 0) >= choice[0])
    chosen_slots, chosen_tokens = most_slots, most_tokens
    pages = -(-longest // config.page_size)
    row_bytes = 4 * longest + 8 * pages + 4 * pages  # tokens, hashes, page table
    if card_bytes is not None:
        rows, logits, activations = (
            int(card_bytes * share) for share in (_ROWS_SHARE, _LOGITS_SHARE, _ACTIVATIONS_SHARE)
        )
        left = max(0, card_bytes - weights) // sizing.bytes_per_token(model, config.pool_dtype)
        while chosen_slots > _LEAST_SLOTS and (
            2 * chosen_slots * row_bytes > rows
            or 4 * chosen_slots * model.vocab_size > logits
            or chosen_slots * _TOKENS_A_SLOT > left
        ):
            chosen_slots //= 2
        wide = 2 * model.intermediate_size * sizing.dtype_bytes(config.dtype)
        while chosen_tokens > _LEAST_TOKENS and chosen_tokens * wide > activations:
            chosen_tokens //= 2
    slots = slots or min(chosen_slots, tokens or chosen_slots)  # a slot without a token in a step could not decode
    tokens = tokens or max(chosen_tokens, slots)
    return replace(config, max_num_seqs=slots, max_num_batched_tokens=tokens, max_queue=queue or max(64, slots))


def _tell(asked: EngineConfig, config: EngineConfig) -> None:
    names = ("max_num_seqs", "max_num_batched_tokens", "max_queue", "num_pages", "max_model_len")
    chosen = [f"{name}={getattr(config, name)}" for name in names if getattr(asked, name) is None]
    if chosen:
        logger.info("Chosen for the model and the device: %s", ", ".join(chosen))


def _with_swap(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """`config` with the size of the host's pool, and what using it costs."""
    if config.preemption == "recompute":
        return config
    page_bytes = config.page_size * sizing.bytes_per_token(model, config.pool_dtype)
    assert config.num_pages is not None
    space = config.swap_space_bytes
    if space is None:
        most = min(_MOST_SWAP_BYTES, int(memory.available_memory_bytes() * memory.CPU_SHARE))
        space = max(CHUNK_PAGES * page_bytes, min(config.num_pages * page_bytes, most))
    cost = config.swap_page_cost
    if config.preemption == "auto" and cost is None:
        machine = costs.machine_of(jax.devices()[0])
        of_model = costs.CostModel.of(model, config.dtype, machine, kv_cache_dtype=config.pool_dtype)
        cost = 2 * of_model.move_page(config.page_size) / of_model.recompute_token()
        logger.info(
            "preemption='auto': on %s, moving a page of %d tokens to the host and back takes as long as computing "
            "%.2f tokens; a request is swapped where that is less than what it would compute again",
            machine.name, config.page_size, cost,
        )  # fmt: skip
    return replace(config, swap_space_bytes=space, swap_page_cost=cost)


def _card_bytes() -> int | None:
    """Bytes of the device's memory; None on a CPU, and where the device does not say."""
    device = jax.devices()[0]
    told = memory.device_memory(device)
    if told is None:
        return None
    card = memory.card_memory(device)
    return told.limit if card is None else card.total


def _weights(params: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def _num_pages(
    config: EngineConfig,
    longest: int,
    model: ModelConfig,
    params: Any,
    temporary_bytes: Callable[[EngineConfig], int],
) -> int:
    """Pages where the caller named no size: what the GPU's memory leaves, or the stated default of a CPU."""
    device, weights = jax.devices()[0], _weights(params)
    if (told := memory.device_memory(device)) is None:
        left = int(memory.available_memory_bytes() * memory.CPU_SHARE)
        page_bytes = config.page_size * sizing.bytes_per_token(model, config.pool_dtype)
        most = memory.DEFAULT_CPU_POOL_BYTES // page_bytes - 1
        pages, beside = _most_pages(config, longest, model, left, most)
        if pages < 1:
            raise ValueError(
                f"{left:,} bytes of main memory can be used (a quarter of what is available), but what the engine "
                f"keeps of requests and pages takes {beside:,}: lower max_model_len, max_num_seqs and max_queue, or "
                "give num_pages"
            )
        return pages
    total = memory.attainable_bytes(told, config.gpu_memory_utilization, card=memory.card_memory(device))
    fewest = -(-longest // config.page_size)
    temporary = temporary_bytes(
        replace(
            config, max_model_len=longest, num_pages=fewest, preemption="recompute", swap_space_bytes=None,
            swap_page_cost=None,
        )
    )  # fmt: skip
    others = max(0, told.in_use - weights)
    left = total - weights - others - temporary
    pages, beside = _most_pages(config, longest, model, left, None)
    if pages < 1:
        raise ValueError(
            f"{total:,} bytes of the device can be used (gpu_memory_utilization "
            f"{config.gpu_memory_utilization:g}), but weights take {weights:,}, the compiled step {temporary:,}, "
            f"what the engine keeps of requests and pages {beside:,} and other arrays {others:,}; an older engine "
            "gives its memory back at close(), and lower max_model_len, max_num_seqs and max_queue take less"
        )
    return pages


def _most_pages(config: EngineConfig, longest: int, model: ModelConfig, left: int, most: int | None) -> tuple[int, int]:
    """The most pages, up to a part in 256, with which all that is allocated on the device takes at most `left` bytes,
    and not more than `most`; 0 where even one is too many. And the bytes beside so large a pool."""

    def footprint(pages: int) -> Footprint:
        tokens = min(longest, pages * config.page_size)  # a request can have no more
        sized = replace(config, num_pages=pages, max_model_len=tokens, pool_bytes=None)
        if config.preemption == "auto":
            sized = replace(sized, swap_page_cost=0.0)  # takes as much room as any
        return Footprint.of(_with_swap(sized, model), model)

    page_bytes = config.page_size * sizing.bytes_per_token(model, config.pool_dtype)
    high = max(left // page_bytes, 1) if most is None else most  # too many, until it is known
    found = footprint(high)
    if found.on_device <= left:
        return high, found.beside_pool
    low, beside = 0, found.beside_pool  # enough room, surely
    guess = (left - beside) // page_bytes - 1  # what is beside a pool grows with it
    while high - low > max(1, low // 256):
        pages = guess if low < guess < high else (low + high) // 2
        found = footprint(pages)
        if found.on_device <= left:
            low, beside = pages, found.beside_pool
        else:
            high = pages
            beside = found.beside_pool if not low else beside
    return low, beside
