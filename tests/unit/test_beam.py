"""Beam search: the rounds, against all continuations of all beams put in order; and the pages of beams, by a stub that
reads them back."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.beams import exhaustive, log_softmax
from support.drive import Ask, Driver, compiled, jit_submit, submission
from support.stubs import STUB_SHAPE, HistoryDecoder

from jpaged.config import EngineConfig
from jpaged.request import BeamSearchParams, FinishReason
from jpaged.runtime.beam_search import Beam, BeamSearch, Candidates
from jpaged.step import EngineState, advance, make_state, violations

VOCAB = 12


def logprobs_after(tokens, seed=0) -> np.ndarray:
    """A model: any distribution, another one after every history."""
    rng = np.random.default_rng([seed, len(tokens), *tokens])
    return log_softmax(rng.normal(0, 2, VOCAB))


@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("stop_ids", [(), (3,), (3, 7)])
@pytest.mark.parametrize("width", [1, 2, 5, 20])
def test_the_rounds_are_those_of_all_continuations(width, stop_ids, length_penalty):
    """With as many candidates as `num_candidates` says, and an end before the last round where that changes nothing."""
    params = BeamSearchParams(width, max_tokens=9, length_penalty=length_penalty)
    count, early = BeamSearch.num_candidates(width, stop_ids, VOCAB), 0
    for seed in range(8):
        search, rounds = BeamSearch(params, stop_ids, 9), 0
        while not search.finished:
            offers = []
            for beam in search.beams:
                model = logprobs_after(beam.token_ids, seed)
                best = np.argsort(-model)[:count]
                offers.append(Candidates(best.tolist(), model[best].tolist()))
            search.advance(offers)
            rounds += 1
        early += rounds < 9
        expected = exhaustive(params, stop_ids, 9, lambda tokens, seed=seed: logprobs_after(tokens, seed))
        found = search.best()
        assert [beam.token_ids for beam in found] == [tokens for _, tokens in expected]
        assert [beam.score(length_penalty) for beam in found] == pytest.approx([score for score, _ in expected])
        for beam in found:
            assert beam.cum_logprob == pytest.approx(sum(beam.logprobs))
            assert beam.finish_reason == (FinishReason.STOP if beam.token_ids[-1] in stop_ids else FinishReason.LENGTH)
    assert early == 0 or stop_ids
    assert early > 0 or (width, length_penalty) != (1, 0.0) or not stop_ids


def test_moves_say_where_beams_come_from():
    search = BeamSearch(BeamSearchParams(2), {9}, max_tokens=3)
    assert search.advance([Candidates([4, 9, 5], [-0.5, -0.6, -0.7])]) == [(0, 4), (0, 5)]
    assert search.ended == [Beam((9,), (-0.6,), -0.6, FinishReason.STOP)]
    offers = [Candidates([1, 2], [-3.0, -3.1]), Candidates([7, 8], [-0.1, -0.2])]
    assert search.advance(offers) == [(1, 7), (1, 8)]
    assert search.advance(offers) == [] and search.finished
    assert [beam.token_ids for beam in search.best()] == [(5, 8, 7), (5, 8, 8)]


def test_equal_candidates_keep_their_order():
    search = BeamSearch(BeamSearchParams(2), (), max_tokens=5)
    search.advance([Candidates([3, 1, 2], [-1.0, -1.0, -1.0])])
    assert [beam.token_ids for beam in search.beams] == [(3,), (1,)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"beam_width": 0}, "beam_width must be at least 1; got 0"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens must be at least 1"),
        ({"beam_width": 2, "length_penalty": math.inf}, "length_penalty must be finite"),
        ({"beam_width": 2, "stop_token_ids": [-1]}, "stop_token_ids must be token ids"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        BeamSearchParams(**fields)


# Pages

CONFIG = EngineConfig(
    page_size=4, num_pages=33, max_num_seqs=6, max_queue=6, max_num_batched_tokens=16, max_model_len=40,
    preemption="auto", swap_space_bytes=1 << 20, swap_page_cost=0,
)  # fmt: skip
READER = HistoryDecoder()
BEAMS = 4
jit_advance = jax.jit(advance)


def beams_of(prompt, max_len: int) -> list[Ask]:
    uids = range(1, 1 + BEAMS)
    return [Ask(uid, prompt, max_len, beam=True, parent=-1 if uid == 1 else 1) for uid in uids]


def offers_of(state: EngineState) -> dict[int, list[int]]:
    record = jax.tree.map(np.asarray, state.record)
    return {int(record.uid[slot]): record.candidates[slot].tolist() for slot in np.flatnonzero(record.offered)}


@pytest.mark.parametrize(
    ("page_size", "budgets", "share"), [(4, (4, 16), True), (4, (4, 16), False), (1, (16,), True), (16, (16,), False)]
)
def test_beams_read_what_they_are(page_size, budgets, share):
    """Beams that become one another at random, beside requests that stand before them and send them away. The stub says
    what comes after a beam's own tokens, so a page that is another's, or copied wrongly, shows."""
    prompt, longest = [3, 1, 4, 1, 5, 9, 2], 30
    total = -(-longest // page_size)
    num_pages = total + (BEAMS - 1) * (total - len(prompt) // page_size) + BEAMS  # as `LLM.beam_search` asks for
    config = replace(CONFIG, num_pages=num_pages, page_size=page_size, enable_prefix_caching=share)
    if not share:  # else those that are preempted go to the host, and become others while they are there
        config = replace(config, swap_page_cost=1e9)
    driver = Driver(config, READER)
    state, rng, swaps = driver.state, np.random.default_rng(page_size), 0
    known = dict.fromkeys(range(1, 1 + BEAMS), prompt)
    state = jit_submit(state, submission(config, beams_of(prompt, 36)))
    offered: dict[int, list[int]] = {}
    rounds = copied = 0
    for number in range(400):
        if number % 8 == 3 and number < 60:
            urgent = [Ask(100 + 4 * number + i, rng.integers(0, 9, 9).tolist(), 16, priority=-1) for i in range(4)]
            state = jit_submit(state, submission(config, urgent))
        driver.state = state
        driver.exchange()
        state = driver.state
        assert violations(state) == []
        state = compiled(READER, int(rng.choice(budgets)), candidates=3)(None, state)
        swaps += int(state.record.to_host.sum())
        assert violations(state) == []
        for uid, candidates in offers_of(state).items():
            following = READER.following(known[uid])
            assert candidates == [(following + i) % READER.vocab for i in range(3)], (number, uid)
            offered[uid] = candidates
        record = jax.tree.map(np.asarray, state.record)
        assert not (record.sampled & (record.uid <= BEAMS)).any(), "a token that nobody asked for"
        if len(offered) < BEAMS:
            continue
        if len(known[1]) == longest:
            break
        sources = rng.integers(1, 1 + BEAMS, BEAMS) if rounds % 3 else np.arange(1, 1 + BEAMS)
        tokens = rng.integers(0, 30, BEAMS)
        known = {uid: [*known[int(sources[uid - 1])], int(tokens[uid - 1])] for uid in known}
        padding = np.full(2, -1)
        beams = (np.concatenate([one, padding]).astype(np.int32) for one in (np.arange(1, 1 + BEAMS), sources, tokens))
        before = np.asarray(state.slots.page_table)
        state = jit_advance(state, *beams)
        assert violations(state) == []
        copied += bool((np.asarray(state.slots.page_table) != before).any())
        rounds, offered = rounds + 1, {}
    assert rounds == longest - len(prompt) and copied > 10
    assert (swaps > 0) == share
    assert int(state.counters.preemptions) > 3


def test_only_the_last_page_is_copied():
    """Four beams of one prompt, in as many pages as need be, and each round computes a token a beam, no more."""
    state = make_state(CONFIG, **STUB_SHAPE)
    prompt = list(range(10))
    state = jit_submit(state, submission(CONFIG, beams_of(prompt, 30)))
    for _ in range(2):
        state = compiled(READER, 16, candidates=3)(None, state)
    assert len(offers_of(state)) == BEAMS - 1 and int(state.record.pages_in_use) == 2 + BEAMS
    uids = jnp.arange(1, 1 + BEAMS)
    for number in range(3):
        state = jit_advance(state, uids, jnp.full(BEAMS, 2), jnp.arange(BEAMS) + number)
        before = int(state.counters.computed_tokens)
        state = compiled(READER, 16, candidates=3)(None, state)
        assert int(state.counters.computed_tokens) - before == BEAMS
        table = np.asarray(state.slots.page_table)[:BEAMS]
        assert (table[:, :2] == table[0, :2]).all() and len(set(table[:, 2].tolist())) == (BEAMS if number < 2 else 1)
    # Twelve tokens: the page that was not full was full when they parted, so all have it, and a new one each.
    assert (table[:, 2] == table[0, 2]).all() and len(set(table[:, 3].tolist())) == BEAMS
