"""Sharing step by step: who computes a page, who waits for it, when it can be found, and which goes first."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drive import Ask, Driver
from support.examples import at_least
from support.stubs import HistoryDecoder

from jpaged.config import EngineConfig
from jpaged.pool import SCRATCH_PAGE
from jpaged.step.sharing import index as prefix
from jpaged.step.sharing.index import WAYS, Prefixes, find, forget, next_to_take, places, spread

CONFIG = EngineConfig(
    page_size=4, num_pages=60, max_num_seqs=5, max_queue=3, max_num_batched_tokens=16, max_model_len=80
)
READER = HistoryDecoder(32)
STEM = np.random.default_rng(0).integers(0, 30, 48).tolist()


def alone(tokens, count: int) -> list[int]:
    return READER.continuation(tokens, count)


def table(driver: Driver, slot: int) -> list[int]:
    slots = driver.state.slots
    return slots.page_table[slot, : int(slots.num_pages[slot])].tolist()


def in_pool(driver: Driver, pages: list[int]) -> np.ndarray:
    return np.asarray(driver.state.pool.k[0, jnp.array(pages)])


def test_who_comes_in_together_shares_what_the_oldest_computes():
    """Five requests with 12 tokens in common: one computes them, four find them, nobody computes them twice. That none
    reads a page before it is computed shows in the tokens."""
    driver = Driver(CONFIG, READER)
    prompts = [[*STEM[:12], i, i, i] for i in range(5)]
    driver.submit(*(Ask(1 + i, tokens, len(tokens) + 6) for i, tokens in enumerate(prompts)))
    first = driver.step(64)
    assert first.running == 5 and first.scheduled.tolist() == [15, 0, 0, 0, 0]
    assert [table(driver, slot) for slot in range(1, 5)] == [table(driver, 0)[:3]] * 4
    assert driver.step().scheduled.tolist() == [1, 3, 3, 3, 3]
    driver.until_done()
    counters = driver.state.counters
    assert int(counters.computed_tokens) == 12 + 5 * (3 + 5)
    assert [driver.got[1 + i].cached_tokens for i in range(5)] == [0, 12, 12, 12, 12]
    assert [driver.got[1 + i].tokens for i in range(5)] == [alone(tokens, 6) for tokens in prompts]
    assert (int(counters.prefix_queries), int(counters.prefix_hits)) == (5 * 15, 4 * 12)


def test_who_waits_is_granted_nothing_and_goes_on_with_the_rest():
    """Prompts of 10 in a budget of 16 come in together. The second waits for 2 pages and computes its last 2 tokens."""
    driver = Driver(CONFIG, READER)
    driver.submit(Ask(1, STEM[:10], 20), Ask(2, STEM[:10], 20), Ask(3, [9] * 3, 20))
    first = driver.step()
    assert first.admitted == 2 and first.scheduled.tolist() == [10, 0, 0, 0, 0] and first.prefix_hits == 8
    assert first.pages_in_use == 3 and first.tokens_stored == 10
    second = driver.step()
    assert second.scheduled.tolist() == [1, 2, 3, 0, 0] and second.prefix_hits == 0
    assert table(driver, 0)[:2] == table(driver, 1)[:2] and table(driver, 0)[2] != table(driver, 1)[2]
    got = driver.until_done()
    assert got[1].tokens == got[2].tokens == alone(STEM[:10], 10) and got[3].tokens == alone([9] * 3, 17)
    assert (got[1].cached_tokens, got[2].cached_tokens) == (0, 8)


def test_the_last_page_of_a_prompt_is_waited_for_by_nobody():
    """Who needs its last token's logits must compute that page. What it has computed then is one page too many."""
    driver = Driver(CONFIG, READER)
    driver.submit(Ask(1, STEM[:4], 20), Ask(2, STEM[:4], 20))
    assert driver.step().scheduled.tolist() == [4, 4, 0, 0, 0]
    assert table(driver, 0) != table(driver, 1)
    record = driver.step()  # the second meets the page of the first and gives its own back
    assert table(driver, 0)[0] == table(driver, 1)[0] and record.pages_in_use == 3
    assert record.tokens_stored == 4 + 1 + 1
    got = driver.until_done()
    assert got[1].tokens == got[2].tokens == alone(STEM[:4], 16)


def test_a_page_of_two_is_changed_by_neither():
    """One ends, the other goes on, a third comes: what the shared pages hold stays as it was, to the bit."""
    driver = Driver(CONFIG, READER)
    driver.submit(Ask(1, [*STEM[:14], 1], 17), Ask(2, [*STEM[:14], 2], 40))
    for _ in range(3):
        driver.step()
    shared = table(driver, 1)[:3]
    before = in_pool(driver, shared)
    assert np.asarray(driver.state.refcount)[shared].tolist() == [2, 2, 2] or driver.got[1].finish
    while not driver.got[1].finish:
        driver.step()
    for _ in range(8):
        driver.step()
    driver.submit(Ask(3, [*STEM[:12], 3, 3], 30))
    driver.until_done()
    np.testing.assert_array_equal(in_pool(driver, shared), before)
    assert driver.got[3].cached_tokens == 12
    for uid, tokens, count in ((1, [*STEM[:14], 1], 2), (2, [*STEM[:14], 2], 25), (3, [*STEM[:12], 3, 3], 16)):
        assert driver.got[uid].tokens == alone(tokens, count)


def test_namespaces_share_nothing():
    driver = Driver(CONFIG, READER)
    driver.submit(*(Ask(uid, STEM[:10], 14, namespace=uid % 2) for uid in (1, 2, 3, 4)))
    driver.until_done()
    assert [driver.got[uid].cached_tokens for uid in (1, 2, 3, 4)] == [0, 0, 8, 8]
    assert driver.state.cached_pages == 6


def test_a_resumed_request_finds_its_own_pages_and_is_counted_once():
    """And what it need not compute again is not counted as lost."""
    driver = Driver(replace(CONFIG, num_pages=20), READER)
    driver.submit(Ask(1, STEM[:20], 60), Ask(2, STEM[20:40], 80))
    lost = recovered = 0
    for _ in range(200):
        record = driver.step()
        lost, recovered = lost + int(record.discarded), recovered + int(record.recovered)
        if record.running == record.waiting == 0:
            break
    counters = driver.state.counters
    assert int(counters.preemptions) > 0 and recovered > 0
    assert (int(counters.prefix_queries), int(counters.prefix_hits)) == (40, 0)
    assert driver.got[2].cached_tokens == 0
    assert int(counters.computed_tokens) - (lost - recovered) == 59 + 79
    assert driver.got[1].tokens == alone(STEM[:20], 40) and driver.got[2].tokens == alone(STEM[20:40], 60)


# The index, alone


def entered(*pages: tuple[int, int, int], num_pages: int = 20) -> Prefixes:
    """Pages `(page, before, token)` of one token each, all findable, of one hash."""
    prefixes = Prefixes.empty(num_pages, 1, enabled=True)
    for way, (page, before, token) in enumerate(pages):
        prefixes = replace(
            prefixes,
            cached=prefixes.cached.at[page].set(True),
            tokens=prefixes.tokens.at[page, 0].set(token),
            before=prefixes.before.at[page].set(before),
            index=prefixes.index.at[0, way].set(page),
        )
    return prefixes


def ask(prefixes: Prefixes, *runs: list[int], before: int = SCRATCH_PAGE, namespace: int = 0) -> list[int]:
    tokens = jnp.array([token for run in runs for token in run], jnp.int32)
    listed = spread(jnp.array([len(run) for run in runs], jnp.int32), len(tokens) + 1)
    size = len(tokens) + 1
    return find(
        prefixes, listed, jnp.zeros((size, 2), jnp.uint32), jnp.pad(tokens, (0, 1))[:, None],
        jnp.full(size, namespace, jnp.int32), jnp.full(size, before, jnp.int32),
    ).tolist()[:-1]  # fmt: skip


def test_everything_is_compared_and_not_the_hash_alone():
    """With one hash for all. Catches: a hit for another's tokens, parent or namespace."""
    prefixes = entered((7, SCRATCH_PAGE, 3))
    assert ask(prefixes, [3]) == [7]
    assert ask(prefixes, [4]) == [0]
    assert ask(prefixes, [3], before=7) == [0]  # it begins a request, and continues none
    assert ask(prefixes, [3], namespace=1) == [0]
    assert ask(replace(prefixes, cached=prefixes.cached.at[7].set(False)), [3]) == [0]
    assert ask(prefixes, [3, 3]) == [7, 0]
    other = replace(prefixes, hash=prefixes.hash.at[7, 1].set(1))
    assert ask(other, [3]) == [0]
    assert ask(prefixes, [4], [3], [3, 3], [4, 3]) == [0, 7, 7, 0, 0, 0]


def test_a_run_is_found_up_to_its_first_gap():
    words = jnp.arange(5, dtype=jnp.uint32)
    prefixes = Prefixes.empty(20, 1, enabled=True)
    chain = {0: 4, 1: 9, 3: 5}  # the page of each place; the third is missing
    for place, page in chain.items():
        prefixes = replace(
            prefixes,
            cached=prefixes.cached.at[page].set(True),
            tokens=prefixes.tokens.at[page, 0].set(place),
            before=prefixes.before.at[page].set(chain.get(place - 1, SCRATCH_PAGE)),
            hash=prefixes.hash.at[page, 1].set(words[place]),
            index=prefixes.index.at[0, place].set(page),
        )
    hashes = jnp.stack([jnp.zeros_like(words), words], axis=1)
    zeros = jnp.zeros(5, jnp.int32)
    tokens = jnp.arange(5, dtype=jnp.int32)[:, None]
    found = find(prefixes, spread(jnp.array([5], jnp.int32), 5), hashes, tokens, zeros, zeros)
    assert found.tolist() == [4, 9, 0, 0, 0]
    # Two runs that meet in the list: the second begins anew.
    found = find(prefixes, spread(jnp.array([1, 4], jnp.int32), 5), hashes, tokens, zeros, zeros + 4)
    assert found.tolist() == [0, 9, 0, 0, 0]


def test_new_pages_take_what_is_empty_in_their_bucket():
    """Catches: an entry that is overwritten while it is live, two that get one way, an equal one that is not seen."""
    prefixes = entered((1, 0, 1), (2, 0, 2), (3, 0, 3))
    prefixes = replace(prefixes, cached=prefixes.cached.at[2].set(False))  # way 1 is empty again
    hashes = jnp.array([[0, 5], [1 << 31, 5], [0, 6], [0, 5], [0, 7], [0, 8]], jnp.uint32)
    wanted = jnp.array([True, True, True, True, True, False])
    bucket, way, again = places(prefixes, hashes, wanted)
    assert bucket.tolist()[:5] == [0, 16, 0, 0, 0]
    assert again.tolist()[:5] == [False, False, False, True, False]
    # By hash: the first takes way 1, its double way 3, which it does not use, and so on.
    assert [way.tolist()[i] for i in (0, 2, 4)] == [1, 4, 5] and way[1] == 0
    full = entered(*((page, 0, page) for page in range(1, WAYS + 1)))
    assert places(full, hashes, wanted)[1].tolist()[0] == WAYS


def test_what_comes_after_a_page_goes_with_it():
    prefixes = forget(entered((1, 0, 1), (2, 1, 2), (3, 2, 3), (4, 0, 4)), jnp.arange(21) == 1)
    assert np.flatnonzero(np.asarray(prefixes.cached)).tolist() == [3, 4]
    assert ask(prefixes, [1, 2, 3]) == [0, 0, 0]


@at_least(50)
@given(data=st.data())
def test_pages_are_taken_in_order(data):
    """First what nobody can find; then what was used longest ago, the deepest first; what is in use never."""
    size, columns = 40, data.draw(st.sampled_from((1, 7, 8, 3000)))
    ints = lambda top: np.array(data.draw(st.lists(st.integers(0, top), min_size=size, max_size=size)))  # noqa: E731
    refcount, findable, depth = ints(1), ints(2) > 0, ints(columns - 1)
    refcount[SCRATCH_PAGE] = 1
    step = data.draw(st.sampled_from((5, 2**31, 2**32 - 1)))
    age = ints(4)
    prefixes = replace(
        Prefixes.empty(size - 1, 1, enabled=True), cached=jnp.array(findable), depth=jnp.array(depth, jnp.int32),
        last_used=jnp.array(step - age, jnp.uint32),
    )  # fmt: skip
    taken = next_to_take(prefixes, jnp.array(refcount, jnp.int32), jnp.uint32(step), columns, size).tolist()
    unused = [page for page in range(size) if not refcount[page]]
    order = sorted(unused, key=lambda page: (findable[page], -age[page], -depth[page]) if findable[page] else (False,))
    assert taken[: len(unused)] == order
    assert sorted(taken) == list(range(size))


def test_pages_unused_for_ages_still_go_deepest_first():
    """Ages are counted up to a limit; a parent must not go before its child there either."""
    prefixes = entered((1, 0, 1), (2, 1, 2), (3, 2, 3))
    prefixes = replace(prefixes, depth=prefixes.depth.at[jnp.array([2, 3])].set(jnp.array([1, 2], jnp.int32)))
    prefixes = replace(prefixes, last_used=prefixes.last_used.at[1].set(5))
    refcount = jnp.where(prefixes.cached, 0, 1)
    assert next_to_take(prefixes, refcount, jnp.uint32(2**32 - 1), 1 << 20, 3).tolist() == [3, 2, 1]


@at_least(30)
@given(data=st.data())
def test_hashes_are_those_of_every_prefix(data):
    """By another way: one after the other, in Python's integers."""
    tokens = np.array(data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=11)), np.int32)
    known, namespace = data.draw(st.integers(1, len(tokens))), data.draw(st.integers(0, 2**31 - 1))
    rows = jnp.stack([jnp.array(tokens), jnp.zeros(len(tokens), jnp.int32)])
    found = prefix.prefix_hashes(rows, jnp.array([known, 0]), jnp.array([namespace, 0], jnp.int32), 4)

    def mix(x):
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = (x ^ x >> shift) * factor % 2**32
        return x ^ x >> 16

    def words(token, place):
        return [mix((mix((token + seed) % 2**32) + place) % 2**32) for seed in (0x9E3779B9, 0x3C6EF372)]

    total = np.array(words(namespace, 2**32 - 1))
    for place, token in enumerate(tokens[:known].tolist()):
        total = (total + words(token, place)) % 2**32
        if place % 4 == 3 or place == known - 1:
            assert found[0, place // 4].tolist() == total.tolist()
    assert jax.tree.leaves(found)[0].dtype == jnp.uint32


@pytest.mark.parametrize("count", [(2, 0, 3), (0, 0, 0), (0, 4, 0), (5, 5, 5)])
def test_runs_are_listed_one_after_the_other(count):
    runs = spread(jnp.array(count, jnp.int32), 8)
    expected = [(k, number) for k, entries in enumerate(count) for number in range(entries)][:8]
    assert int(runs.used.sum()) == len(expected)
    owners, numbers = runs.owner.tolist(), runs.number.tolist()
    assert list(zip(owners, numbers, strict=True))[: len(expected)] == expected
    good = jnp.array([True, False, True, True, True, True, True, True])
    whole = {k: next((n for (o, n), ok in zip(expected, good.tolist(), strict=False) if o == k and not ok), 99)
             for k in range(3)}  # fmt: skip
    found = runs.unbroken(good).tolist()[: len(expected)]
    assert found == [number < whole[k] for k, number in expected]
