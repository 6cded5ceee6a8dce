"""The invariants of the engine, for tests and for people who drive the state by hand. Runs on the host."""

from __future__ import annotations

import numpy as np

from jpaged.pool import SCRATCH_PAGE
from jpaged.step.state import EngineState, Status


def violations(state: EngineState) -> list[str]:
    """What does not hold in `state`, in words; empty if all is well."""
    wrong: list[str] = []
    refcount = np.asarray(state.refcount)
    slots, requests = state.slots, state.requests
    occupied, request = np.asarray(slots.occupied), np.asarray(slots.request)
    computed, num_pages = np.asarray(slots.computed), np.asarray(slots.num_pages)
    table, page_size = np.asarray(slots.page_table), state.pool.page_size
    status, known = np.asarray(requests.status), np.asarray(requests.known)

    named = np.zeros_like(refcount)
    for slot in range(len(occupied)):
        pages = table[slot, : num_pages[slot]]
        np.add.at(named, pages, 1)
        if not occupied[slot] and (num_pages[slot] or computed[slot]):
            wrong.append(f"empty slot {slot} holds {num_pages[slot]} pages and {computed[slot]} tokens")
        if (table[slot, num_pages[slot] :] != SCRATCH_PAGE).any():
            wrong.append(f"slot {slot}: entries past its {num_pages[slot]} pages are not the scratch page")
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
    if (known[live] > np.asarray(requests.max_len)[live]).any():
        wrong.append("a live request is longer than its max_len")
    return wrong
