"""Sharing pages between requests: looking for pages that are computed already, and offering those that are.

    admit    a request that is admitted gets the pages that hold its first tokens
    waits    of the requests that would compute the same page next, only the first does
    enter    pages that the step has filled can be found from now on
    attach   a running request at the end of a page gets the next ones, if others have just computed them

A request that fills a page equal to one that can be found takes that one and gives its own back. So the pages that
its table names are those that the index knows, and a page is in use whenever one that comes after it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jpaged.pool import SCRATCH_PAGE
from jpaged.step.pages import change, page_at
from jpaged.step.scheduling.order import running_rank
from jpaged.step.sharing.index import LOOKUP_PAGES, WAYS, Runs, find, places, spread
from jpaged.step.state import EngineState, Requests
from jpaged.step.status import NO_REQUEST, Finish, Status


@dataclass(frozen=True)
class Found:
    """What a lookup found, entry after entry `[N]`."""

    page: jax.Array  # int32, SCRATCH_PAGE: none
    owner: jax.Array  # int32, which of the requests that asked
    column: jax.Array  # int32, which page of its request
    asked: int  # entries, the first ones, that were looked for; the others were given

    @property
    def hit(self) -> jax.Array:
        return self.page != SCRATCH_PAGE


def shareable(known: jax.Array, page_size: int) -> jax.Array:
    """Pages of a request that it may find computed: at least one of its tokens must be computed to sample the next."""
    return (known - 1) // page_size


def _page_tokens(requests: Requests, row: jax.Array, column: jax.Array, page_size: int) -> jax.Array:
    place = column[:, None] * page_size + jnp.arange(page_size, dtype=jnp.int32)[None]
    return requests.tokens[row[:, None], place]


def lookup(
    state: EngineState,
    row: jax.Array,
    begin: jax.Array,
    count: jax.Array,
    before: jax.Array,
    given: jax.Array | None = None,
) -> Found:
    """Looks for `count[k]` `[K]` pages of the requests `row[k]`, from their page `begin[k]` on, which comes after page
    `before[k]` of the pool; or takes them from the table of slot `given[k]`, if that is not S. Those that no longer fit
    in a lookup are not looked for: a request that has more goes on looking in `attach`."""
    columns, slots = state.requests.prefix_hash.shape[1], state.slots
    asked = min(row.shape[0] * columns, LOOKUP_PAGES)
    most = asked if given is None else max(asked, columns)  # a fork gets all pages of its parent
    takes = jnp.zeros(row.shape, bool) if given is None else given < slots.num_slots
    runs = spread(jnp.where(state.prefixes.enabled | takes, count, 0), most)
    asks, column = row[runs.owner], begin[runs.owner] + runs.number
    page = _find(state, *jax.tree.map(lambda array: array[:asked], (runs, asks, column, before[runs.owner])))
    if given is not None:
        page = jnp.pad(page, (0, most - asked), constant_values=SCRATCH_PAGE)
        there = slots.page_table[jnp.minimum(given, slots.num_slots - 1)[runs.owner], column]
        page = jnp.where(takes[runs.owner], jnp.where(runs.used, there, SCRATCH_PAGE), page)
    return Found(page, runs.owner, column, asked)


def _find(state: EngineState, runs: Runs, row: jax.Array, column: jax.Array, before: jax.Array) -> jax.Array:
    requests = state.requests
    tokens = _page_tokens(requests, row, column, state.pool.page_size)
    return find(state.prefixes, runs, requests.prefix_hash[row, column], tokens, requests.namespace[row], before)


def pin(state: EngineState, found: Found, slot: jax.Array) -> EngineState:
    """Puts what was found into the tables: the pages of the k-th request that asked go into the table of slot
    `slot[k]` `[K]`; S: into none."""
    slots, requests, num_slots = state.slots, state.requests, state.slots.num_slots
    slot = jnp.where(found.hit, slot[found.owner], num_slots)
    pages = jnp.zeros(num_slots, jnp.int32).at[slot].add(1, mode="drop")
    pinned = jnp.where(slot < num_slots, found.page, state.refcount.shape[0])
    num_pages = slots.num_pages + pages
    tokens = pages * state.pool.page_size
    again = requests.preempted[slots.request]
    # What a fork begins with was counted when its parent was admitted.
    first = jnp.where(again | (requests.parent[slots.request] != NO_REQUEST), 0, tokens)
    # What a slot without a request names is meaningless, and so it gains nothing.
    cached_tokens = requests.cached_tokens.at[slots.request].add(first)
    hits = jnp.sum(first, dtype=jnp.int32)
    return replace(
        state,
        holders=change(state.holders, found.page, slot, slot < num_slots, holds=True),
        refcount=state.refcount.at[pinned].add(1, mode="drop"),
        slots=replace(
            slots,
            page_table=slots.page_table.at[slot, found.column].set(found.page, mode="drop"),
            num_pages=num_pages,
            num_computed_tokens=slots.num_computed_tokens + tokens,
            entered=jnp.where(pages > 0, num_pages, slots.entered),
        ),
        requests=replace(requests, cached_tokens=cached_tokens),
        counters=replace(state.counters, prefix_hits=state.counters.prefix_hits + hits.astype(jnp.uint32)),
        record=replace(
            state.record,
            prefix_hits=state.record.prefix_hits + hits,
            recovered=state.record.recovered + jnp.sum(jnp.where(again, tokens, 0), dtype=jnp.int32),
        ),
    )


def attach(state: EngineState) -> EngineState:
    """Gives running requests at the end of a page those of their next pages that can be found."""
    slots, page_size = state.slots, state.pool.page_size
    page = slots.num_computed_tokens // page_size
    runs = slots.occupied & (state.requests.status[slots.request] == Status.RUNNING)
    at_end = runs & (slots.num_computed_tokens % page_size == 0)
    more = jnp.maximum(shareable(state.requests.num_tokens[slots.request], page_size) - page, 0)
    found = lookup(state, slots.request, page, jnp.where(at_end, more, 0), _page_before(state, page))
    return pin(state, found, jnp.arange(slots.num_slots, dtype=jnp.int32))


def _page_before(state: EngineState, column: jax.Array) -> jax.Array:
    """The page `[S]` before that of `column` `[S]` in each table; SCRATCH_PAGE before the first."""
    slot = jnp.arange(column.shape[0], dtype=jnp.int32)
    return jnp.where(column > 0, page_at(state.slots.page_table, slot, column - 1), SCRATCH_PAGE)


def waits(state: EngineState) -> jax.Array:
    """Whether a slot `[S]` waits for a page: it is at the end of one, and a request before it in `running_order` has to
    compute the very page that is its next. The first of those waits for no other, so that page will be there.

    If the hash lies, a request waits for nothing, and computes its page when the other has gone on.
    """
    slots, requests, page_size = state.slots, state.requests, state.pool.page_size
    row, page = slots.request, slots.num_computed_tokens // page_size
    known, rank = requests.num_tokens[row], running_rank(state)
    hash_ = requests.prefix_hash[row, page]
    computes = slots.occupied & (page < known // page_size)
    could_find = slots.occupied & (page < shareable(known, page_size)) & (slots.num_computed_tokens % page_size == 0)
    same = (page[:, None] == page[None]) & jnp.all(hash_[:, None] == hash_[None], axis=-1)
    before = rank[None] < rank[:, None]
    return state.prefixes.enabled & could_find & jnp.any(same & before & computes[None], axis=1)


def enter(state: EngineState, most: int) -> EngineState:
    """Lets others find the pages that the step has filled, at most `most` of them.

    One that can be found already, under another number, is taken in place of the request's own. Of several equal ones
    filled in one step the first is entered; the others meet it in the next step. What comes after a page that cannot
    be found can neither, and a bucket may be full: such pages are not shared. Nor are those of a row whose logits were
    not finite, as what they hold may not be.
    """
    slots, requests, prefixes, page_size = state.slots, state.requests, state.prefixes, state.pool.page_size
    offers = prefixes.enabled & slots.occupied & (state.record.finish != Finish.ERROR)
    runs = spread(jnp.where(offers, slots.num_computed_tokens // page_size - slots.entered, 0), most)
    slot, first = runs.owner, runs.number == 0
    column, row = slots.entered[slot] + runs.number, slots.request[slot]
    own = slots.page_table[slot, column]
    before = jnp.where(column > 0, slots.page_table[slot, jnp.maximum(column - 1, 0)], SCRATCH_PAGE)
    hash_, namespace = requests.prefix_hash[row, column], requests.namespace[row]
    tokens = _page_tokens(requests, row, column, page_size)

    there = find(prefixes, runs, hash_, tokens, namespace, before)
    known = there != SCRATCH_PAGE
    new = runs.used & ~known
    bucket, way, again = places(prefixes, hash_, new)
    again &= new
    rooted = ~first | (column == 0) | prefixes.cached[before]
    entered = new & runs.unbroken(known | (new & ~again & rooted & (way < WAYS)))
    settled = runs.used & runs.unbroken(~again)
    before = jnp.where(first, before, jnp.roll(jnp.where(known, there, own), 1))

    page = jnp.where(entered, own, state.refcount.shape[0])
    prefixes = replace(
        prefixes,
        cached=prefixes.cached.at[page].set(True, mode="drop"),
        tokens=prefixes.tokens.at[page].set(tokens, mode="drop"),
        before=prefixes.before.at[page].set(before, mode="drop"),
        namespace=prefixes.namespace.at[page].set(namespace, mode="drop"),
        hash=prefixes.hash.at[page].set(hash_, mode="drop"),
        index=prefixes.index.at[jnp.where(entered, bucket, prefixes.index.shape[0]), way].set(own, mode="drop"),
    )
    table = slots.page_table.at[jnp.where(known, slot, slots.num_slots), column].set(there, mode="drop")
    given_back, taken = (jnp.where(known, pages, state.refcount.shape[0]) for pages in (own, there))
    refcount = state.refcount.at[given_back].add(-1, mode="drop").at[taken].add(1, mode="drop")
    slots = replace(slots, page_table=table, entered=slots.entered.at[slot].add(settled.astype(jnp.int32)))
    holders = change(change(state.holders, own, slot, known, holds=False), there, slot, known, holds=True)
    return replace(state, holders=holders, refcount=refcount, prefixes=prefixes, slots=slots)


def book_pages(state: EngineState) -> EngineState:
    """Books which pages are in use, when the step is over."""
    in_use = state.refcount > 0
    last_used = jnp.where(in_use, state.counters.steps, state.prefixes.last_used)
    # Pages of several tables are full, and what they hold is there once.
    twice = state.pool.page_size * jnp.sum(jnp.maximum(state.refcount - 1, 0), dtype=jnp.int32)
    record = replace(
        state.record,
        # Counted from the tables, as every page that some table names.
        pages_in_use=jnp.sum(in_use, dtype=jnp.int32) - 1,
        pages_cached=state.cached_pages,
        tokens_stored=jnp.sum(state.slots.num_computed_tokens, dtype=jnp.int32) - twice,
    )
    return replace(state, prefixes=replace(state.prefixes, last_used=last_used), record=record)
