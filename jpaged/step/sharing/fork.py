"""Requests that go on from one point: several continuations of a prompt, and branches of a running generation.

A fork is a request with the tokens of another, its *parent*, and a seed of its own. It waits outside the queue until
the parent has computed all of these tokens but the last. Then it is admitted as any request is, with the parent's full
pages in its table; of the page after those it gets a copy, which is the first page that it takes:

    parent  t0 t1 t2 t3 | t4 t5 t6          table: 7 2        page 7: in both tables
    fork    t0 t1 t2 t3 | t4 t5 t6'         table: 7 5        page 5: a copy of page 2; t6' is written to it next

Its last token it computes itself, because it needs the logits after it. Pages that are in two tables are full, and are
never written again: neither of two requests that share it changes what the other sees.

If the parent ends before its forks have begun, the first of them inherits its slot, with the pages of the tokens that
they have in common, and the others wait for that one. So a prompt is computed once however many go on from it.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jpaged.pool import SCRATCH_PAGE
from jpaged.step.pages import page_at
from jpaged.step.state import EngineState, Requests
from jpaged.step.status import NO_REQUEST, Status

#: Forks that are admitted with a copied page in one step at most. Every step moves as many pages, if only the scratch
#: page.
COPIES = 4


def fork(state: EngineState, uids: jax.Array, new_uids: jax.Array, seeds: jax.Array) -> EngineState:
    """Branches live requests: each new one has all that the old one knows, prompt and output so far, and its rules.

    It goes on as the old one would if it were given the new seed from here on; with temperature 0 both get the same
    tokens. There must be that many FREE rows, as in `submit`.

    Args:
        uids: `[N]` int32, the requests to branch. Those that are not there, or have ended, are not branched.
        new_uids: `[N]` int32, their numbers, which follow all that were given before.
        seeds: `[N]` uint32, from which the new ones sample.
    """
    requests, rows = state.requests, state.requests.num_rows
    parent = requests.rows_of(uids)
    there = parent != NO_REQUEST
    free = jnp.nonzero(requests.status == Status.FREE, size=uids.shape[0], fill_value=rows)[0]
    place = jnp.cumsum(there, dtype=jnp.int32) - 1
    row = jnp.where(there, free[jnp.maximum(place, 0)], rows)
    count = jnp.sum(there, dtype=jnp.uint32)
    old = requests.of(parent)
    new = replace(
        old,
        status=jnp.full_like(uids, Status.WAITING),
        uid=new_uids,
        arrival=new_uids,
        sampling=replace(old.sampling, seed=seeds.astype(jnp.uint32)),
        cached_tokens=jnp.zeros_like(uids),
        preempted=jnp.zeros(uids.shape, bool),
        parent=parent,
    )
    requests = jax.tree.map(lambda array, values: array.at[row].set(values, mode="drop"), requests, new)
    counters = replace(state.counters, submitted=state.counters.submitted + count)
    return replace(state, requests=requests, counters=counters)


def slots_of(state: EngineState) -> jax.Array:
    """The slot `[R]` of each request; S where it has none."""
    slots, rows = state.slots, state.requests.num_rows
    row = jnp.where(slots.occupied, slots.request, rows)
    slot = jnp.arange(slots.num_slots, dtype=jnp.int32)
    return jnp.full(rows, slots.num_slots, jnp.int32).at[row].set(slot, mode="drop")


def parent_slots(state: EngineState) -> jax.Array:
    """The slot `[R]` of each request's parent; S where it has no parent, or that one is not running."""
    parent = state.requests.parent
    return jnp.where(parent == NO_REQUEST, state.slots.num_slots, slots_of(state)[jnp.maximum(parent, 0)])


def ready(state: EngineState) -> jax.Array:
    """Requests `[R] bool` that wait, and for nothing but their turn: of a fork, the parent has computed all its tokens
    but the last, and has offered the full ones of their pages to others; see `share.enter`."""
    slots, requests = state.slots, state.requests
    slot = parent_slots(state)
    at = jnp.minimum(slot, slots.num_slots - 1)
    computed = slots.num_computed_tokens[at]
    settled = ~state.prefixes.enabled | (slots.entered[at] == computed // state.pool.page_size)
    begins = (slot < slots.num_slots) & (computed >= requests.num_tokens - 1) & settled
    return (requests.status == Status.WAITING) & ((requests.parent == NO_REQUEST) | begins)


def copy_tails(state: EngineState, source: jax.Array, budget: int) -> EngineState:
    """Copies page `source[s]` `[S]` to the page of the next token of slot s; nothing where it is SCRATCH_PAGE. At most
    `budget`, or COPIES, are copied: no more are admitted."""
    slots = state.slots
    slot = jnp.nonzero(
        source != SCRATCH_PAGE, size=min(COPIES, budget, slots.num_slots), fill_value=slots.num_slots
    )[0]  # fmt: skip
    every = jnp.arange(slots.num_slots, dtype=jnp.int32)
    next_page = page_at(slots.page_table, every, slots.num_computed_tokens // state.pool.page_size)
    source, target = (pages.at[slot].get(mode="fill", fill_value=SCRATCH_PAGE) for pages in (source, next_page))
    return replace(state, pool=state.pool.copy(source, target))


# When a parent ends


def heirs(requests: Requests, over: jax.Array) -> jax.Array:
    """The first `[R]` of those that wait for each of `over` `[R] bool`; R where none does."""
    rows = requests.num_rows
    orphan = _children(requests, over)
    parent = jnp.where(orphan, requests.parent, rows)
    latest = jnp.iinfo(jnp.int32).max
    first = jnp.full(rows, latest, jnp.int32).at[parent].min(requests.arrival, mode="drop")
    is_first = orphan & (requests.arrival == first[jnp.minimum(parent, rows - 1)])
    row = jnp.arange(rows, dtype=jnp.int32)
    return jnp.full(rows, rows, jnp.int32).at[jnp.where(is_first, parent, rows)].set(row, mode="drop")


def heritage(state: EngineState, heir: jax.Array) -> jax.Array:
    """Tokens `[S]` of each slot that the request `heir[s]` `[S]` can take over in their pages: those that it knows, but
    the last; and not those in a page that is not full for it, if others use that page or find it."""
    slots, requests, page_size = state.slots, state.requests, state.pool.page_size
    tokens = jnp.minimum(slots.num_computed_tokens, requests.num_tokens[jnp.minimum(heir, requests.num_rows - 1)] - 1)
    column, rest = jnp.divmod(tokens, page_size)
    page = page_at(slots.page_table, jnp.arange(slots.num_slots, dtype=jnp.int32), column)
    own = (state.refcount[page] == 1) & ~state.prefixes.cached[page]
    return jnp.where(own, tokens, tokens - rest)


def adopt(requests: Requests, over: jax.Array, heir: jax.Array) -> jax.Array:
    """The parents `[R]` when those of `over` `[R] bool` have gone, and `heir` `[R]` are their heirs."""
    orphan = _children(requests, over)
    new = heir[jnp.maximum(requests.parent, 0)]
    own = jnp.arange(requests.num_rows, dtype=jnp.int32)
    return jnp.where(orphan, jnp.where(new == own, NO_REQUEST, new), requests.parent)


def disown(requests: Requests, failed: jax.Array) -> jax.Array:
    """The parents `[R]` when no request is to begin with the pages of `failed` `[R] bool`."""
    return jnp.where(_children(requests, failed), NO_REQUEST, requests.parent)


def _children(requests: Requests, which: jax.Array) -> jax.Array:
    waits = (requests.status == Status.WAITING) & (requests.parent != NO_REQUEST)
    return waits & which[jnp.maximum(requests.parent, 0)]
