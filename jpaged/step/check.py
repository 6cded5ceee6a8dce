"""The invariants of the engine, for tests and for a state that is driven by hand. Runs on the host, and checks what
can be found of pages against what it says they hold, in other ways than the step does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jpaged.pool import CHUNK_PAGES, SCRATCH_PAGE
from jpaged.step.sharing.index import root_hash, token_hash
from jpaged.step.state import EngineState
from jpaged.step.status import NO_REQUEST, Status
from jpaged.step.swap.table import NO_CHUNK


def violations(state: EngineState) -> list[str]:
    """What does not hold in `state`, in words; empty if all is well."""
    wrong: list[str] = []
    # All at once: an array that is fetched or indexed by itself takes as long as the checks of it.
    parts = jax.device_get((state.holders, state.refcount, state.slots, state.requests, state.prefixes, state.swap))
    holders, refcount, slots, requests, prefixes, swap = parts
    host = replace(state, refcount=refcount, slots=slots, requests=requests, prefixes=prefixes, swap=swap)
    occupied, request = slots.occupied, slots.request
    computed, num_pages = slots.num_computed_tokens, slots.num_pages
    table, page_size = slots.page_table, state.pool.page_size
    status, known = requests.status, requests.num_tokens

    named = np.zeros_like(refcount)
    for slot in range(len(occupied)):
        pages = table[slot, : num_pages[slot]]
        np.add.at(named, pages, 1)
        if not occupied[slot] and (num_pages[slot] or computed[slot]):
            wrong.append(f"empty slot {slot} holds {num_pages[slot]} pages and {computed[slot]} tokens")
        bits = (holders[slot // 32] >> np.uint32(slot % 32)) & np.uint32(1)
        if sorted(pages.tolist()) != np.flatnonzero(bits).tolist():
            wrong.append(f"slot {slot} names the pages {pages.tolist()}, and holds {np.flatnonzero(bits).tolist()}")
        if (prefixes.depth[pages % len(refcount)] != np.arange(len(pages))).any():
            wrong.append(f"slot {slot}: its pages {pages.tolist()} are not at the columns that they say")
        if len(set(pages.tolist())) != len(pages):
            wrong.append(f"slot {slot} names a page twice: {pages.tolist()}")
        if (pages == SCRATCH_PAGE).any() or (pages < 0).any() or (pages >= len(refcount)).any():
            wrong.append(f"slot {slot} names a page that is not a request's: {pages.tolist()}")
        if occupied[slot]:
            row = request[slot]
            if -(-computed[slot] // page_size) != num_pages[slot]:
                wrong.append(f"slot {slot}: {computed[slot]} tokens are stored in {num_pages[slot]} pages")
            if status[row] not in (Status.RUNNING, Status.FINISHED, Status.ABORTED):
                wrong.append(f"slot {slot} belongs to row {row}, whose status is {Status(status[row]).name}")
            if computed[slot] > known[row]:
                wrong.append(f"slot {slot}: {computed[slot]} tokens computed of {known[row]} known")
    named[SCRATCH_PAGE] += 1
    if (named != refcount).any():
        pages = np.flatnonzero(named != refcount)
        wrong.append(f"reference counts of pages {pages.tolist()} are {refcount[pages]}, tables say {named[pages]}")
    owners = request[occupied]
    if len(set(owners.tolist())) != len(owners):
        wrong.append(f"a request has two slots: {owners.tolist()}")
    running = np.flatnonzero(status == Status.RUNNING)
    if not set(running.tolist()) <= set(owners.tolist()):
        wrong.append(f"running rows without a slot: {sorted(set(running.tolist()) - set(owners.tolist()))}")
    live = np.isin(status, (Status.WAITING, Status.RUNNING))
    if (known[live] > requests.sampling.max_len[live]).any():
        wrong.append("a live request is longer than its max_len")
    for row in np.flatnonzero(requests.parent != NO_REQUEST):
        wrong += _violations_of_a_fork(requests, int(row))
    return wrong + _violations_of_swap(host) + _violations_of_sharing(host)


def _violations_of_swap(state: Any) -> list[str]:
    """The same for what is on the host. `state` is an `EngineState` of numpy arrays, but for its pool."""
    if state.swap is None:
        return []
    wrong: list[str] = []
    swap, status = state.swap, state.requests.status
    named = np.zeros(swap.num_chunks, np.int64)
    for row, chunks in enumerate(swap.table):
        own, computed = chunks[chunks != NO_CHUNK], swap.num_computed_tokens[row]
        np.add.at(named, own, 1)
        pages = -(-computed // state.pool.page_size)
        if len(own) != -(-pages // CHUNK_PAGES) or (chunks[: len(own)] == NO_CHUNK).any():
            wrong.append(f"row {row} has {computed} tokens on the host, in the chunks {chunks.tolist()}")
        if computed and status[row] not in (Status.WAITING, Status.ABORTED):
            wrong.append(f"row {row} has pages on the host, and its status is {Status(status[row]).name}")
        if computed > state.requests.num_tokens[row]:
            wrong.append(f"row {row} has more tokens on the host than it knows")
    if (named != ~swap.free).any():
        chunks = np.flatnonzero(named != ~swap.free)
        wrong.append(f"chunks {chunks.tolist()} are named {named[chunks]} times, and free: {swap.free[chunks]}")
    return wrong


def _violations_of_a_fork(requests: Any, row: int) -> list[str]:
    """The same for one that has not begun."""
    parent, known = int(requests.parent[row]), int(requests.num_tokens[row])
    if requests.status[row] not in (Status.WAITING, Status.ABORTED, Status.FREE):
        return [f"row {row} has begun and waits for row {parent} still"]
    if requests.status[row] != Status.WAITING:
        return []
    if requests.status[parent] == Status.FREE:
        return [f"row {row} waits for row {parent}, which has gone"]
    same = requests.namespace[row] == requests.namespace[parent] and known <= requests.num_tokens[parent]
    if not same or (requests.tokens[row, :known] != requests.tokens[parent, :known]).any():
        return [f"row {row} is a fork of row {parent}, but has other tokens"]
    return []


def _violations_of_sharing(state: Any) -> list[str]:
    """The same for what is shared and cached."""
    wrong: list[str] = []
    prefixes, slots, requests = state.prefixes, state.slots, state.requests
    refcount, page_size = state.refcount, state.pool.page_size
    findable, before = prefixes.cached, prefixes.before
    if findable[SCRATCH_PAGE] or (findable.any() and not prefixes.enabled):
        wrong.append("pages can be found that must not: the scratch page, or any where nothing is shared")
    holds: dict[tuple, int] = {}
    bits = len(prefixes.index).bit_length() - 1
    place = np.arange(page_size, dtype=np.int32)
    for page in np.flatnonzero(findable):
        above, depth = before[page], prefixes.depth[page]
        tokens = prefixes.tokens[page]
        content = (int(prefixes.namespace[page]), int(above), *tokens.tolist())
        if content in holds:
            wrong.append(f"pages {holds[content]} and {page} can both be found for the same tokens")
        holds[content] = int(page)
        hash_ = token_hash(tokens, depth * page_size + place).sum(axis=0, dtype=np.uint32)
        if above == SCRATCH_PAGE:
            fits = depth == 0
            hash_ = hash_ + root_hash(prefixes.namespace[page : page + 1])[0]
        else:
            fits = findable[above] and depth == prefixes.depth[above] + 1
            fits = fits and prefixes.namespace[above] == prefixes.namespace[page]
            fits = fits and refcount[above] >= refcount[page]
            fits = fits and prefixes.last_used[above] >= prefixes.last_used[page]
            hash_ = hash_ + prefixes.hash[above]
        if not fits or (hash_ != prefixes.hash[page]).any():
            wrong.append(f"page {page} of depth {depth} does not come after page {above}")
        if page not in prefixes.index[prefixes.hash[page, 0] >> np.uint32(32 - bits)]:
            wrong.append(f"page {page} can be found but is not in the index")
    shared: dict[int, tuple] = {}
    for slot in np.flatnonzero(slots.occupied):
        row, entered = slots.request[slot], slots.entered[slot]
        if entered > slots.num_computed_tokens[slot] // page_size:
            wrong.append(f"slot {slot}: {entered} full pages entered of {slots.num_computed_tokens[slot]} tokens")
        for column in range(slots.num_pages[slot]):
            page = slots.page_table[slot, column]
            tokens = requests.tokens[row, column * page_size : (column + 1) * page_size]
            prefix = requests.namespace[row], requests.tokens[row, : (column + 1) * page_size].tolist()
            if column >= entered and (findable[page] or (prefixes.enabled and refcount[page] != 1)):
                wrong.append(f"slot {slot}: page {page} is shared before it is computed and entered")
            elif refcount[page] > 1 and (column + 1) * page_size > slots.num_computed_tokens[slot]:
                wrong.append(f"slot {slot}: page {page} is shared, and it is not full")
            elif refcount[page] > 1 and shared.setdefault(page, prefix) != prefix:
                wrong.append(f"slot {slot}: page {page} is shared with a request of other tokens")
            elif findable[page] and (
                prefixes.tokens[page].tolist() != tokens.tolist()
                or prefixes.namespace[page] != requests.namespace[row]
                or before[page] != (slots.page_table[slot, column - 1] if column else SCRATCH_PAGE)
            ):
                wrong.append(f"slot {slot}: page {page} does not hold the request's page {column}")
    for row in np.flatnonzero(np.isin(requests.status, (Status.WAITING, Status.RUNNING))):
        tokens = requests.tokens[row, : requests.num_tokens[row]]
        hashes = token_hash(tokens, np.arange(len(tokens))).cumsum(axis=0, dtype=np.uint32)
        hashes = hashes + root_hash(requests.namespace[row : row + 1])
        ends = np.minimum(np.arange(page_size, len(tokens) + page_size, page_size), len(tokens)) - 1
        if (requests.prefix_hash[row, : len(ends)] != hashes[ends]).any():
            wrong.append(f"the hashes of row {row} are not those of its tokens")
    return wrong
