"""From tokens per slot to one packed batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jpaged.pool import SCRATCH_PAGE, StepBatch
from jpaged.step.state import EngineState


def pack(state: EngineState, tokens: jax.Array, budget: int) -> tuple[StepBatch, jax.Array]:
    """Packs the slots that compute something into rows without gaps.

    Args:
        tokens: `[S]` int32, how many each slot computes; their sum is at most `budget`.

    Returns:
        The batch, with `budget` tokens and `min(budget, S)` rows; and `slot_of_row` `[rows]`, `S` for padding rows.
    """
    slots, requests = state.slots, state.requests
    num_slots = slots.num_slots
    rows = min(budget, num_slots)
    slot_of_row = jnp.nonzero(tokens > 0, size=rows, fill_value=num_slots)[0].astype(jnp.int32)
    used = slot_of_row < num_slots
    slot = jnp.minimum(slot_of_row, num_slots - 1)

    count = jnp.where(used, tokens[slot], 0)
    query_start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count, dtype=jnp.int32)])
    index = jnp.arange(budget, dtype=jnp.int32)
    token_row = jnp.sum(index[:, None] >= query_start[None, 1:], axis=1, dtype=jnp.int32)
    padding = token_row == rows
    row = jnp.minimum(token_row, rows - 1)
    position = jnp.where(padding, 0, slots.num_computed_tokens[slot[row]] + index - query_start[row])
    token_ids = requests.tokens[slots.request[slot[row]], position]
    num_pages = jnp.where(used, slots.num_pages[slot], 0)
    column = jnp.arange(slots.page_table.shape[1], dtype=jnp.int32)
    batch = StepBatch(
        token_ids=jnp.where(padding, 0, token_ids),
        positions=position,
        token_row=token_row,
        query_start=query_start,
        kv_len=jnp.where(used, slots.num_computed_tokens[slot] + count, 0),
        page_table=jnp.where(column[None] < num_pages[:, None], slots.page_table[slot], SCRATCH_PAGE),
        logit_index=jnp.maximum(query_start[1:] - 1, 0),
    )
    return batch, slot_of_row
