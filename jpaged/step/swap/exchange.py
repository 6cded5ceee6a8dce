"""Between two bursts: preempted requests are swapped out, or discard what they have computed; the first requests of the
queue are resumed if their pages are on the host.

The step can preempt too, but it cannot move pages to the host: that takes as long as it takes, and a program of fixed
shapes would move as many in every step, if only to itself. So an exchange looks ahead, as far as a burst goes, and the
state that it returns needs no more than it has. What is left to the step is what an exchange cannot see: who becomes
the head of the queue within a burst.

Each victim goes the way that costs less by `Swap.page_cost`, and the cheap one only if the host has room.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jpaged.pool import CHUNK_PAGES, SCRATCH_PAGE
from jpaged.step.decisions import placed
from jpaged.step.pages import leading, take_unused
from jpaged.step.scheduling.admit import admit
from jpaged.step.scheduling.evict import evict, for_pages, for_the_head, send_back
from jpaged.step.scheduling.order import running_order
from jpaged.step.sharing.index import LOOKUP_PAGES, spread
from jpaged.step.state import EngineState
from jpaged.step.status import NO_REQUEST
from jpaged.step.swap.table import Moves, Swap


def exchange(state: EngineState, ahead: int | jax.Array) -> tuple[EngineState, Moves]:
    """Evicts what has ended, makes room for the next `ahead` steps, and brings in the head of the queue from the host.

    Args:
        state: one that has a host pool.
        ahead: the steps of a burst.

    Returns:
        The state as it is when `Moves` have been done, and these.

    Raises:
        ValueError: the state has no host pool.
    """
    if state.swap is None:
        raise ValueError("this state has no host pool: make it with preemption='swap' or 'auto'")
    state = evict(state)
    slots, requests = state.slots, state.requests
    row = slots.request
    known = jnp.minimum(requests.num_tokens[row] + ahead - 1, requests.sampling.max_len[row])
    victim = for_pages(state, jnp.where(slots.occupied, jnp.maximum(known - slots.num_computed_tokens, 0), 0))
    unlimited = requests.tokens.size
    victim |= for_the_head(send_back(state, victim), unlimited, from_host=True)
    state, out_chunk, out_pages = _send_away(state, victim)
    return _bring_back(state, unlimited, out_chunk, out_pages)


def _send_away(state: EngineState, victim: jax.Array) -> tuple[EngineState, jax.Array, jax.Array]:
    """When `victim` `[S] bool` have lost their slots: the state, and what goes to the host, as in `Moves`."""
    assert state.swap is not None
    slots, swap, page_size = state.slots, state.swap, state.pool.page_size
    most, last_first = _most_chunks(state, swap), running_order(state)[::-1]
    # What others hold as well is found again.
    shared = leading(slots, lambda page: state.refcount[page] > 1)
    alone = jnp.maximum(slots.num_computed_tokens - shared * page_size, 0)
    cheaper = swap.page_cost * slots.num_pages.astype(jnp.float32) <= alone.astype(jnp.float32)
    chunks = jnp.where(victim & cheaper, -(-slots.num_pages // CHUNK_PAGES), 0)[last_first]
    fits = jnp.cumsum(chunks, dtype=jnp.int32) <= jnp.sum(swap.free, dtype=jnp.int32)
    chunks = jnp.where(fits, chunks, 0)

    runs = spread(chunks, most)
    slot = last_first[runs.owner]
    chunk = jnp.nonzero(swap.free, size=most, fill_value=swap.num_chunks)[0].astype(jnp.int32)
    chunk = jnp.where(runs.used, chunk, swap.num_chunks)
    columns, pages = _columns(slots.page_table, slot, runs.number)
    pages = jnp.where(runs.used[:, None] & (columns < slots.num_pages[slot][:, None]), pages, SCRATCH_PAGE)

    rows = state.requests.num_rows
    goes = jnp.zeros_like(victim).at[last_first].set(chunks > 0)
    row = jnp.where(goes, slots.request, rows)
    left = jnp.where(victim, state.requests.uid[slots.request], NO_REQUEST)
    swap = replace(
        swap,
        free=swap.free.at[chunk].set(False, mode="drop"),
        table=swap.table.at[jnp.where(runs.used, slots.request[slot], rows), runs.number].set(chunk, mode="drop"),
        num_computed_tokens=swap.num_computed_tokens.at[row].set(slots.num_computed_tokens, mode="drop"),
        notes=replace(
            swap.notes,
            left=left,
            to_host=goes,
            discarded=jnp.sum(jnp.where(victim & ~goes, slots.num_computed_tokens, 0), dtype=jnp.int32),
        ),
    )
    return replace(send_back(state, victim), swap=swap), chunk, pages


def _bring_back(
    state: EngineState, unlimited: int, out_chunk: jax.Array, out_pages: jax.Array
) -> tuple[EngineState, Moves]:
    """The first of the queue, as far as they are on the host and `admit` admits them. Pages that they
    find are not brought."""
    before = state
    state, _ = admit(state, unlimited, from_host=True)
    assert state.swap is not None
    slots, swap, page_size, num_pages = state.slots, state.swap, state.pool.page_size, state.refcount.shape[0]
    came = slots.occupied & ~before.slots.occupied
    stored = jnp.where(came, swap.num_computed_tokens[slots.request], 0)
    found = slots.num_pages
    need = jnp.maximum(-(-stored // page_size) - found, 0)
    most = min(state.pool.num_pages, max(slots.page_table.shape[1], LOOKUP_PAGES) + slots.num_slots)
    state = take_unused(state, need, most)
    page_table, held = state.slots.page_table, state.slots.num_pages

    runs = spread(-(-stored // (page_size * CHUNK_PAGES)), _most_chunks(state, swap))
    slot = runs.owner
    chunk = jnp.where(runs.used, swap.table[slots.request[slot], runs.number], swap.num_chunks)
    columns, into = _columns(page_table, slot, runs.number)
    wanted = runs.used[:, None] & (columns >= found[slot][:, None]) & (columns < held[slot][:, None])

    row = jnp.where(came, slots.request, state.requests.num_rows)
    rows = jnp.zeros(state.requests.num_rows, bool).at[row].set(True, mode="drop")
    notes = replace(
        swap.notes,
        restored=jnp.sum(came, dtype=jnp.int32),
        placed=placed(before.slots, state.slots, swap.notes.placed.most),
    )
    state = replace(
        state,
        slots=replace(
            state.slots,
            num_computed_tokens=jnp.where(
                came, jnp.maximum(slots.num_computed_tokens, stored), slots.num_computed_tokens
            ),
        ),
        swap=replace(swap.without(rows), notes=notes),
    )
    chunk = jnp.where(jnp.any(wanted, axis=1), chunk, swap.num_chunks)
    return state, Moves(out_chunk, out_pages, chunk, jnp.where(wanted, into, num_pages))


def _most_chunks(state: EngineState, swap: Swap) -> int:
    """L, the most that move one way."""
    return min(swap.num_chunks, state.slots.num_slots * swap.table.shape[1])


def _columns(page_table: jax.Array, slot: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The columns `[L, CHUNK_PAGES]` of chunk `number` `[L]` of a table, and the pages there in those of `slot` `[L]`;
    past the table's end, what is in its last column."""
    columns = number[:, None] * CHUNK_PAGES + jnp.arange(CHUNK_PAGES, dtype=jnp.int32)[None]
    return columns, page_table[slot[:, None], jnp.minimum(columns, page_table.shape[1] - 1)]
