"""The state as a value: made, given requests, asked to give them up; and the checker that looks for what is wrong."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.drive import Ask, Driver, submission
from support.stubs import STUB_SHAPE, ScriptDecoder

from jpaged.config import EngineConfig
from jpaged.pool import SCRATCH_PAGE
from jpaged.step import Status, abort, evict, make_state, submit, violations
from jpaged.step.sampling.params import Sampling

CONFIG = EngineConfig(
    page_size=4, num_pages=12, max_num_seqs=3, max_queue=2, max_num_batched_tokens=16, max_model_len=20
)
SCRIPT = ScriptDecoder()


def fresh():
    return make_state(CONFIG, **STUB_SHAPE)


def asks(*uids: int) -> list[Ask]:
    return [Ask(uid=uid, prompt=[uid] * uid, max_len=uid + 3, stop_ids=[uid], seed=2**32 - uid) for uid in uids]


def test_an_empty_engine_holds_nothing():
    state = fresh()
    assert violations(state) == []
    assert int(state.free_pages) == CONFIG.num_pages == state.pool.num_pages
    assert state.pool.nbytes == 2 * 13 * 4 * 2 * 4
    assert state.refcount[SCRATCH_PAGE] == 1
    assert state.requests.num_rows == 5 and state.slots.num_slots == 3


def test_no_two_arrays_share_a_buffer():
    """JX-03: a buffer donated twice is an error, or worse. Equal constants must not be one array."""
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(fresh())]
    assert len(set(pointers)) == len(pointers)


def test_a_pool_too_small_for_the_longest_request_says_so():
    """PR-04: start-up with a pool below max_model_len."""
    with pytest.raises(ValueError, match="max_model_len 49 needs 13 pages of 4 tokens, but the pool has 12"):
        make_state(replace(CONFIG, max_model_len=49), **STUB_SHAPE)
    with pytest.raises(ValueError, match="chooses no sizes, as LLM and Engine do: give num_pages"):
        make_state(replace(CONFIG, num_pages=None), **STUB_SHAPE)


def test_submitted_requests_queue_in_order_and_keep_every_field():
    """Catches: a field that is not carried over; padding of the batch that becomes a request."""
    state = submit(fresh(), submission(CONFIG, asks(1, 2), size=4))
    state = submit(state, submission(CONFIG, asks(3), size=4))
    requests = jax.tree.map(np.asarray, state.requests)
    assert requests.status.tolist() == [Status.WAITING] * 3 + [Status.FREE] * 2
    assert requests.uid[:3].tolist() == [1, 2, 3]
    assert requests.arrival[:3].tolist() == [1, 2, 3]
    assert requests.num_tokens[:3].tolist() == requests.num_prompt_tokens[:3].tolist() == [1, 2, 3]
    assert requests.sampling.max_len[:3].tolist() == [4, 5, 6]
    assert requests.tokens[2, :3].tolist() == [3, 3, 3]
    assert requests.sampling.stop_ids[:3, 0].tolist() == [1, 2, 3] and (requests.sampling.stop_ids[:, 1:] == -1).all()
    assert requests.sampling.seed[:3].tolist() == [2**32 - 1, 2**32 - 2, 2**32 - 3]
    assert int(state.counters.submitted) == 3
    assert violations(state) == []


def test_a_row_that_becomes_free_is_used_again_without_its_past():
    """Catches: stop ids, lengths or sampling parameters of the last owner."""
    state = submit(fresh(), submission(CONFIG, [Ask(1, [9] * 10, 15, 12, [1, 2, 3], 0.5, 4, 0.5, 0.5, 6)]))
    state = evict(abort(state, jnp.array([1], jnp.int32)))
    state = submit(state, submission(CONFIG, [Ask(2, [8], 3)]))
    row = jax.tree.map(lambda a: np.asarray(a)[0], state.requests)
    assert (row.uid, row.num_tokens, row.num_prompt_tokens, row.arrival) == (2, 1, 1, 2)
    plain = Sampling.empty(1)
    plain.max_len[:] = 3
    jax.tree.map(np.testing.assert_array_equal, row.sampling, jax.tree.map(lambda a: a[0], plain))


def test_more_requests_than_rows_are_dropped_and_harm_nobody():
    """Padding leaks: JAX would clamp the row that is not there to the last one."""
    state = submit(fresh(), submission(CONFIG, asks(1, 2, 3, 4), size=4))
    state = submit(state, submission(CONFIG, asks(5, 6, 7), size=4))
    assert np.asarray(state.requests.uid).tolist() == [1, 2, 3, 4, 5]
    assert violations(state) == []


def test_abort_names_live_requests_only():
    """Catches: an abort that reaches a finished request, a free row (whose uid is 0), or everyone."""
    driver = Driver(CONFIG, SCRIPT)
    driver.submit(*asks(1, 2, 3))
    driver.step()
    driver.submit(*asks(4))
    driver.abort(2, 4, 77, 0, -1)
    status = np.asarray(driver.state.requests.status)
    assert status.tolist() == [
        Status.RUNNING, Status.ABORTED, Status.RUNNING, Status.ABORTED, Status.FREE
    ]  # fmt: skip
    driver.step()
    status = np.asarray(driver.state.requests.status)
    assert status[1] == status[3] == Status.FREE
    assert violations(driver.state) == []


def prefixes(state, **changes):
    return replace(state, prefixes=replace(state.prefixes, **changes))


def running():
    driver = Driver(CONFIG, SCRIPT)
    driver.submit(Ask(1, [1] * 6, 20), Ask(2, [2] * 5, 20))
    driver.step()
    return driver.state


def test_the_checker_sees_pages_that_can_be_found_twice():
    """Two pages of one content; a page that was used after the one before it; one before that nobody can find."""
    driver = Driver(CONFIG, SCRIPT)
    driver.submit(Ask(1, [1] * 9, 20), Ask(2, [2] * 9, 20))
    driver.step()
    state, table = driver.state, driver.state.slots.page_table.tolist()
    first, second = table[0][:2]
    other = table[1][0]
    assert violations(state) == []
    copied = {
        name: getattr(state.prefixes, name).at[other].set(getattr(state.prefixes, name)[first])
        for name in ("tokens", "before", "namespace", "depth", "hash")
    }
    assert any("can both be found for the same" in wrong for wrong in violations(prefixes(state, **copied)))
    for changes in (
        {"cached": state.prefixes.cached.at[first].set(False)},
        {"last_used": state.prefixes.last_used.at[first].set(0)},
    ):
        found = violations(prefixes(state, **changes))
        assert any(f"page {second} of depth 1 does not come after page {first}" in wrong for wrong in found)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda s: replace(s, refcount=s.refcount.at[1].add(1)), r"reference counts of pages \[1\]"),
        (lambda s: replace(s, refcount=s.refcount.at[SCRATCH_PAGE].set(0)), r"reference counts of pages \[0\]"),
        (
            lambda s: replace(s, slots=replace(s.slots, page_table=s.slots.page_table.at[0, 0].set(3))),
            "reference counts",
        ),
        (
            lambda s: replace(s, holders=s.holders.at[0, 4].set(0)),
            r"slot 1 names the pages \[3, 4\], and holds \[3\]",
        ),
        (
            lambda s: prefixes(s, depth=s.prefixes.depth.at[4].set(0)),
            r"slot 1: its pages \[3, 4\] are not at the columns that they say",
        ),
        (
            lambda s: replace(s, slots=replace(s.slots, page_table=s.slots.page_table.at[0, 1].set(SCRATCH_PAGE))),
            "slot 0 names a page that is not a request's",
        ),
        (
            lambda s: replace(s, slots=replace(s.slots, num_computed_tokens=s.slots.num_computed_tokens.at[0].set(3))),
            "slot 0: 3 tokens are stored in 2 pages",
        ),
        (
            lambda s: replace(s, slots=replace(s.slots, num_computed_tokens=s.slots.num_computed_tokens.at[0].set(8))),
            "computed of 7 known",
        ),
        (
            lambda s: replace(s, slots=replace(s.slots, occupied=s.slots.occupied.at[0].set(False))),
            "empty slot 0 holds 2 pages",
        ),
        (lambda s: replace(s, slots=replace(s.slots, request=s.slots.request.at[1].set(0))), "a request has two slots"),
        (
            lambda s: replace(s, requests=replace(s.requests, status=s.requests.status.at[0].set(Status.WAITING))),
            "slot 0 belongs to row 0, whose status is WAITING",
        ),
        (
            lambda s: replace(s, requests=replace(s.requests, status=s.requests.status.at[4].set(Status.RUNNING))),
            r"running rows without a slot: \[4\]",
        ),
        (
            lambda s: replace(s, requests=replace(s.requests, num_tokens=s.requests.num_tokens.at[0].set(21))),
            "longer than its max_len",
        ),
        (lambda s: prefixes(s, cached=s.prefixes.cached.at[SCRATCH_PAGE].set(True)), "found that must not"),
        (lambda s: prefixes(s, enabled=jnp.array(False)), "found that must not"),
        (lambda s: prefixes(s, cached=s.prefixes.cached.at[4].set(True)), "page 4 is shared before it is computed"),
        (lambda s: prefixes(s, tokens=s.prefixes.tokens.at[1, 2].set(9)), "depth 0 does not come after page 0"),
        (lambda s: prefixes(s, namespace=s.prefixes.namespace.at[1].set(9)), "does not hold the request's page 0"),
        (lambda s: prefixes(s, before=s.prefixes.before.at[1].set(3)), "page 1 of depth 0 does not come after page 3"),
        (lambda s: prefixes(s, depth=s.prefixes.depth.at[1].set(1)), "page 1 of depth 1 does not come after page 0"),
        (lambda s: prefixes(s, index=s.prefixes.index * 0), "page 1 can be found but is not in the index"),
        (
            lambda s: replace(s, slots=replace(s.slots, entered=s.slots.entered.at[0].set(2))),
            "slot 0: 2 full pages entered of 6 tokens",
        ),
        (
            lambda s: replace(s, requests=replace(s.requests, tokens=s.requests.tokens.at[0, 5].set(9))),
            "the hashes of row 0 are not those of its tokens",
        ),
        (
            lambda s: replace(s, slots=replace(s.slots, page_table=s.slots.page_table.at[0, 1].set(1))),
            "slot 0 names a page twice",
        ),
    ],
)
def test_the_checker_finds_what_is_wrong(break_it, words):
    """A checker that never complains proves nothing: each invariant, broken on purpose, is named."""
    state = running()
    assert violations(state) == []
    assert re.search(words, "\n".join(violations(break_it(state))))
