"""Forks: a prompt that is computed once for all its continuations, and branches of what runs. The stub reads the pool
back, so that a page that is shared too far, or copied too late, shows in the next token."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.drive import Ask, Driver
from support.shapes import ENGINE, MODEL, READER
from support.stubs import ScriptDecoder

from jpaged.config import EngineConfig
from jpaged.pool import KVPool
from jpaged.request import Request, SamplingParams
from jpaged.runtime.engine import Engine
from jpaged.step import Finish, fork
from jpaged.step.sharing.fork import COPIES

CONFIG = EngineConfig(
    page_size=4, num_pages=24, max_num_seqs=4, max_queue=12, max_num_batched_tokens=16, max_model_len=40,
    token_budgets=(4, 16), dtype="float32",
)  # fmt: skip
PROMPT = [5, 3, 8, 1, 9, 2, 7, 4, 6, 0, 2]  # two pages and three tokens


def follow(prompt, count: int) -> list[int]:
    return READER.continuation(prompt, count)


def continuations(prompt, count: int, tokens: int) -> list[Ask]:
    return [Ask(1 + i, prompt, len(prompt) + tokens, parent=-1 if i == 0 else 1) for i in range(count)]


@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("count", [2, 4, 9])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_a_prompt_is_computed_once(length, count, tokens, share):
    """However many go on from it, more than there are slots too, and if the first ends with its first token. Each fork
    computes the prompt's last token, for its logits; and one that inherits a page which others can find by now, that
    page. Catches: forks that come in before the prompt is computed; a parent that takes its pages with it."""
    driver = Driver(replace(CONFIG, enable_prefix_caching=share), READER)
    prompt = PROMPT[:length]
    driver.submit(*continuations(prompt, count, tokens))
    got = driver.until_done()
    assert all(one.tokens == follow(prompt, tokens) and one.finish == Finish.LENGTH for one in got.values())
    once = length + (count - 1) + count * (tokens - 1)
    computed = int(driver.state.counters.computed_tokens)
    assert once <= computed <= once + share * (count - 1) * (CONFIG.page_size - 1)
    if tokens == 1 and length % CONFIG.page_size:
        assert computed == once


def test_full_pages_are_shared_and_the_last_is_copied():
    driver = Driver(CONFIG, READER)
    driver.submit(*continuations(PROMPT, 3, 6))
    driver.step()
    driver.step()
    table, refcount = np.asarray(driver.state.slots.page_table), np.asarray(driver.state.refcount)
    first, second = table[0, :2]
    assert (table[:3, :2] == [first, second]).all() and refcount[first] == refcount[second] == 3
    assert len(set(table[:3, 2].tolist())) == 3 and (refcount[table[:3, 2]] == 1).all()
    pages = np.asarray(driver.state.pool.k)[0, table[:3, 2], 0, :3, 0]
    assert (pages == PROMPT[8:]).all()
    # In two pages of their own and two that they share, not in three times three.
    assert int(driver.state.record.pages_in_use) == 2 + 3


def test_more_come_in_than_a_step_can_copy_for():
    """Catches: a copy past those that a step makes, and so a page without its first tokens."""
    count = COPIES + 4
    config = replace(
        CONFIG, max_num_seqs=count, max_queue=4, max_num_batched_tokens=32, num_pages=60, token_budgets=None
    )
    driver = Driver(config, READER)
    driver.submit(*continuations(PROMPT, count, 6))
    admitted = [int(driver.step().admitted) for _ in range(3)]
    assert admitted == [1, COPIES, 3]
    assert all(one.tokens == follow(PROMPT, 6) for one in driver.until_done().values())


def test_two_who_share_do_not_change_each_other():
    """One goes on and fills its last page, the other stays where it was, and then goes on another way."""
    driver = Driver(CONFIG, ScriptDecoder())
    driver.submit(Ask(1, PROMPT, 40, temperature=1.0, seed=1))
    driver.step()
    driver.fork(1, 2, seed=2)
    driver.fork(1, 3, seed=1)
    got = driver.until_done()
    assert got[1].tokens[0] == got[2].tokens[0]  # from before the fork
    assert got[1].tokens == got[3].tokens != got[2].tokens


@pytest.mark.parametrize("at", range(12))
@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
def test_a_branch_has_what_its_parent_has_and_goes_on(at, share):
    """In any state: waiting, in the middle of its prompt, decoding at every place of a page, ended."""
    driver = Driver(replace(CONFIG, enable_prefix_caching=share), READER)
    driver.submit(Ask(1, PROMPT, len(PROMPT) + 8))
    for _ in range(at):
        driver.step(5)
    ended = driver.got[1].finish != Finish.NOT
    driver.fork(1, 2)
    driver.fork(2, 3)  # of one that has not begun
    got = driver.until_done(5)
    assert got[1].tokens == follow(PROMPT, 8)
    for uid in (2, 3):
        assert got[uid].tokens == follow(PROMPT, 8)
        assert (got[uid].finish == Finish.NOT) == ended
    assert ended or int(driver.state.counters.computed_tokens) <= len(PROMPT) + 3 * 8 + 2
    assert int(driver.state.counters.submitted) == 1 + (0 if ended else 2)


def test_a_fork_of_nobody_changes_nothing():
    driver = Driver(CONFIG, READER)
    driver.submit(Ask(1, PROMPT, 20))
    driver.step()
    nobody = jnp.array([7, -1], jnp.int32), jnp.array([8, 9], jnp.int32), jnp.zeros(2, jnp.uint32)
    jax.tree.map(np.testing.assert_array_equal, fork(driver.state, *nobody), driver.state)


def test_a_fork_of_one_that_fails_computes_its_prompt_itself():
    """What a page holds whose row was not finite must not be anybody's."""
    driver = Driver(CONFIG, READER)
    driver.submit(*continuations([*PROMPT, 31], 3, 4), Ask(9, PROMPT, 20))
    got = driver.until_done()
    assert [got[uid].finish for uid in (1, 2, 3)] == [Finish.ERROR] * 3
    assert got[9].tokens == follow(PROMPT, 20 - len(PROMPT))
    assert int(driver.state.available_pages) == CONFIG.num_pages


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("who", [(1,), (1, 2), (2, 3), (1, 2, 3, 4, 5)])
def test_an_abort_in_any_state_gives_its_pages_back_and_leaves_the_others(who, at):
    """Forks that wait, that have just come in, that run; and parents before them."""
    driver = Driver(replace(CONFIG, max_num_seqs=3), READER)
    driver.submit(*continuations(PROMPT, 5, 5), Ask(9, PROMPT[:7], 12))
    for _ in range(at):
        driver.step(6)
    driver.abort(*who)
    got = driver.until_done(6)
    for uid in {1, 2, 3, 4, 5} - set(who):
        assert got[uid].tokens == follow(PROMPT, 5)
    assert got[9].tokens == follow(PROMPT[:7], 5)
    assert int(driver.state.available_pages) == CONFIG.num_pages


def test_a_child_that_stands_before_its_parent_does_not_send_it_away():
    """A victim policy by which the last goes first: to make way for the fork, its parent would have to go, and the fork
    would wait for it again. Catches: a loop in which nobody ever goes on."""
    config = replace(CONFIG, max_num_seqs=1, victim=lambda candidates: -candidates.arrival)
    driver = Driver(config, READER)
    driver.submit(*continuations(PROMPT, 3, 4))
    got = driver.until_done(limit=100)
    assert all(one.tokens == follow(PROMPT, 4) for one in got.values())


@pytest.mark.parametrize("pages", [10, 36])
def test_forks_that_are_preempted_get_the_same_tokens(pages):
    driver = Driver(replace(CONFIG, num_pages=pages, enable_prefix_caching=False), READER)
    driver.submit(*continuations(PROMPT, 4, 20))
    got = driver.until_done()
    assert all(one.tokens == follow(PROMPT, 20) for one in got.values())
    assert (int(driver.state.counters.preemptions) > 0) == (pages < 36)


def test_pages_are_copied_as_they_were():
    """A page that is copied to and from at once is read before it is written."""
    pool = KVPool(*(jnp.arange(48.0).reshape(2, 6, 1, 2, 2) + side for side in (0, 100)))
    copied = pool.copy(jnp.array([1, 2, 0]), jnp.array([2, 3, 0]))
    for before, after in ((pool.k, copied.k), (pool.v, copied.v)):
        np.testing.assert_array_equal(after, np.asarray(before)[:, [0, 1, 1, 2, 4, 5]])


# The engine


def make(decoder=READER) -> Engine:
    return Engine(decoder, (), MODEL, ENGINE)


def drain(engine: Engine) -> dict[tuple[str, int], list[int]]:
    tokens: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for event in engine.burst():
            tokens.setdefault((event.request_id, event.index), []).append(event.token_id)
    return tokens


def test_a_continuation_is_what_a_request_with_its_seed_would_be():
    params = SamplingParams(temperature=1.0, n=4, seed=2**32 - 2, max_tokens=12, ignore_eos=True)
    engine, alone = make(ScriptDecoder()), make(ScriptDecoder())
    engine.submit(Request("a", tuple(PROMPT), params))
    for index in range(4):
        own = replace(params, n=1, seed=(2**32 - 2 + index) % 2**32)
        alone.submit(Request(str(index), tuple(PROMPT), own))
    together, each = drain(engine), drain(alone)
    assert [together["a", index] for index in range(4)] == [each[str(index), 0] for index in range(4)]
    assert len({tuple(tokens) for tokens in together.values()}) == 4


def test_the_host_holds_continuations_that_find_no_row():
    """Those that come later begin with the pages of one that is there, or find them."""
    engine = make()
    engine.submit(Request("a", tuple(PROMPT), SamplingParams(temperature=0, n=30, max_tokens=3, ignore_eos=True)))
    assert drain(engine) == {("a", index): follow(PROMPT, 3) for index in range(30)}
    stats = engine.stats()
    assert stats.in_use_pages == stats.running == stats.waiting == 0
    assert stats.prefix_queries == stats.prefix_hits + len(PROMPT)  # a request is counted once


def test_aborting_a_request_ends_all_its_continuations():
    engine = make()
    for name in ("a", "b"):
        engine.submit(Request(name, tuple(PROMPT), SamplingParams(temperature=0, n=6, max_tokens=5, ignore_eos=True)))
    engine.burst()
    assert [engine.label(uid) for uid in (1, 2, 99)] == ["a.0", "a.1", None]
    engine.abort(["a"])
    assert drain(engine) == {("b", index): follow(PROMPT, 5) for index in range(6)}


def test_a_branch_of_a_running_request_and_what_cannot_be_branched():
    engine = make()
    engine.warmup()
    programs = engine.num_programs
    engine.submit(Request("a", tuple(PROMPT), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)))
    with pytest.raises(ValueError, match=r"continuation 0 of request 'a' .* begun and not ended are \[\]"):
        engine.fork("a", "b")
    seen = [event.token_id for _ in range(3) for event in engine.burst()]
    engine.fork("a", "b", seed=3)
    with pytest.raises(ValueError, match="'b' is in use"):
        engine.fork("a", "b")
    with pytest.raises(ValueError, match="continuation 2"):
        engine.fork("a", "c", index=2)
    tokens = drain(engine)
    assert seen + tokens["a", 0] == follow(PROMPT, 6)
    assert tokens["b", 0] == tokens["a", 0]
    assert engine.num_programs == programs
    for number in range(ENGINE.max_num_seqs + ENGINE.max_queue):
        engine.submit(Request(str(number), tuple(PROMPT), SamplingParams(temperature=0, max_tokens=6)))
    engine.burst()
    with pytest.raises(ValueError, match="all 7 rows"):
        engine.fork("0", "c")
