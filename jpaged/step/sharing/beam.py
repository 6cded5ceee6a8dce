"""Beams: requests whose next tokens the host chooses.

A *held* request is given no token of the sampler. When all its tokens are computed, the step offers the candidates
for the next one, and the request stays in its slot until `advance` says how it goes on. A beam search is some held
requests of one prompt: of all their candidates the best are chosen, and each beam becomes what one of them was, and a
token more.

    beam 0   .. the cat              beam 0 was beam 0     .. the cat sat        table: 7 2     as before
    beam 1   .. a dog                beam 1 was beam 0     .. the cat is         table: 7 5     5: a copy of page 2

Only tables change hands: full pages are in all tables that need them, and the page that is not full is copied for all
but one of the beams that go on from it.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jpaged.pool import SCRATCH_PAGE
from jpaged.step.pages import bits_of, change, give_back, page_at
from jpaged.step.sharing.fork import slots_of
from jpaged.step.sharing.index import forget, next_to_take, token_hash
from jpaged.step.state import EngineState


def advance(state: EngineState, uids: jax.Array, sources: jax.Array, tokens: jax.Array) -> EngineState:
    """Makes request `uids[i]` what request `sources[i]` is, with `tokens[i]` after it, for all i at once.

    All of them are held, and have offered candidates; each is named once in `uids`. One that was preempted since has no
    pages, and computes all again when it is admitted, as does one that continues it. Where pages are short, a beam that
    finds none for its copy computes those tokens again.

    Args:
        uids, sources: `[N]` int32, NO_REQUEST for no request.
        tokens: `[N]` int32.
    """
    requests, slots, page_size = state.requests, state.slots, state.pool.page_size
    size, none = uids.shape[0], slots.num_slots
    row, source = requests.rows_of(uids), requests.rows_of(sources)
    there = (row >= 0) & (source >= 0)
    row, source = jnp.where(there, row, requests.num_rows), jnp.maximum(source, 0)
    slot_of_row = slots_of(state)
    from_slot = jnp.where(there, slot_of_row[source], none)
    slot = jnp.where(there, slot_of_row[jnp.minimum(row, requests.num_rows - 1)], none)

    # Which beam continues which. One of those that continue a source keeps its last page: the source, if it is one.
    at = jnp.minimum(from_slot, none - 1)
    gets = (slot < none) & (from_slot < none)
    index = jnp.arange(size, dtype=jnp.int32)
    prefers = jnp.where(gets, index + jnp.where(slot == from_slot, 0, size), 2 * size)
    first = jnp.full(none, 2 * size, jnp.int32).at[from_slot].min(prefers, mode="drop")
    keeps = gets & (first[at] == prefers)
    full, rest = jnp.divmod(slots.num_computed_tokens[at], page_size)
    # Full pages that were not offered yet belong to the keeper alone.
    settled = ~state.prefixes.enabled | (slots.entered[at] == full)
    shared = jnp.where(gets, jnp.where(settled | keeps, full, jnp.minimum(slots.entered[at], full)), 0)
    column = jnp.arange(slots.page_table.shape[1], dtype=jnp.int32)[None]
    last = page_at(slots.page_table, at, full)

    # Tables of full pages and kept ones.
    kept_pages = shared + (keeps & (rest > 0)).astype(jnp.int32)
    table = jnp.where(column < kept_pages[:, None], slots.page_table[at], SCRATCH_PAGE)
    changes = jnp.zeros(none, bool).at[slot].set(True, mode="drop")
    holders, refcount = give_back(state.holders, state.refcount, bits_of(changes)[:, None])
    named = (column < kept_pages[:, None]) & (slot < none)[:, None]
    refcount = refcount.at[jnp.where(named, table, refcount.shape[0])].add(1, mode="drop")
    holders = change(holders, table, jnp.broadcast_to(slot[:, None], table.shape), named, holds=True)

    # Copies, while there are pages.
    copies = gets & ~keeps & settled & (rest > 0)
    order = jnp.cumsum(copies, dtype=jnp.int32) - 1
    most = min(size, state.pool.num_pages)
    pages = next_to_take(state.prefixes, refcount, state.counters.steps, column.shape[1], most)
    copies &= order < jnp.minimum(jnp.sum(refcount == 0, dtype=jnp.int32), pages.shape[0])
    new = jnp.where(copies, pages[jnp.clip(order, 0, pages.shape[0] - 1)], SCRATCH_PAGE)
    taken = jnp.zeros(refcount.shape, bool).at[jnp.where(copies, new, refcount.shape[0])].set(True, mode="drop")
    table = table.at[index, jnp.where(copies, full, column.shape[1])].set(new, mode="drop")
    holders = change(holders, new, slot, copies, holds=True)
    pool = state.pool.copy(jnp.where(copies, last, SCRATCH_PAGE), new)

    computed = shared * page_size + jnp.where(copies | keeps, rest, 0)
    slots = replace(
        slots,
        num_computed_tokens=slots.num_computed_tokens.at[slot].set(computed, mode="drop"),
        entered=slots.entered.at[slot].set(jnp.minimum(jnp.where(gets, slots.entered[at], 0), shared), mode="drop"),
        num_pages=slots.num_pages.at[slot].set(kept_pages + copies.astype(jnp.int32), mode="drop"),
        page_table=slots.page_table.at[slot].set(table, mode="drop"),
    )

    known = requests.num_tokens[source]
    page, offset = jnp.divmod(known, page_size)
    hashes = requests.prefix_hash[source]
    before = hashes[index, jnp.where(offset == 0, jnp.maximum(page - 1, 0), page)]
    hashes = hashes.at[index, page].set(before + token_hash(tokens, known), mode="drop")
    words = requests.tokens[source].at[index, known].set(tokens, mode="drop")
    # What it had on the host was of what it was.
    other_row = jnp.where(row == source, requests.num_rows, row)
    others = jnp.zeros(requests.num_rows, bool).at[other_row].set(True, mode="drop")
    requests = replace(
        requests,
        tokens=requests.tokens.at[row].set(words, mode="drop"),
        num_tokens=requests.num_tokens.at[row].set(known + 1, mode="drop"),
        prefix_hash=requests.prefix_hash.at[row].set(hashes, mode="drop"),
    )
    return replace(
        state,
        pool=pool,
        holders=holders,
        refcount=refcount + taken.astype(jnp.int32),
        prefixes=replace(
            forget(state.prefixes, taken),
            depth=state.prefixes.depth.at[jnp.where(copies, new, refcount.shape[0])].set(full, mode="drop"),
        ),
        slots=slots,
        requests=requests,
        swap=state.swap and state.swap.without(others),
    )
