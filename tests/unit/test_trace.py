"""Traces and replays of them. The decoder reads the pool back, so that a page in the wrong place changes a token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.stories import READER, TIGHT, requests, told

from jpaged.config import EngineConfig
from jpaged.policy import shortest_prompt_first
from jpaged.record.inputs import Abort, Burst, Submit
from jpaged.record.replay import replay
from jpaged.record.step_records import unstacked
from jpaged.record.trace import Trace
from jpaged.request import FinishReason
from jpaged.step import NO_REQUEST, Finish, Submission, step, violations
from jpaged.step.decisions import placed

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def story():
    """The engine, what it emitted, and its trace."""
    engine, tokens = told()
    return engine, tokens, engine.trace


def test_the_story_has_what_is_tested(story):
    """Catches: tests of preemption, sharing or bursts in which none happens."""
    engine, _, trace = story
    stats = engine.stats()
    assert stats.preemptions > stats.swaps > 0 and stats.prefix_hits > 0
    kinds = {type(given).__name__ for given in trace.inputs}
    assert kinds == {"Restart", "Submit", "Fork", "Abort", "Burst", "ResetPrefixCache"}
    assert {given.steps for given in trace.inputs if isinstance(given, Burst)} == {1, 3}
    for part in ("restored", "found", "taken", "shared"):
        assert sum(len(getattr(record.decisions, part).page) for record in trace.records) > 0, part
    assert [name for name in ("r1", "r9", "full") if name in story[1]] == ["r1"]


def test_a_trace_changes_no_token_and_compiles_nothing_more(story):
    """Catches: a record that the schedule depends on; a shape of it that changes from step to step."""
    engine, tokens, trace = story
    plain, expected = told(trace=False)
    assert plain.trace is None and plain.state.record.decisions is None
    assert tokens == expected
    assert engine.num_programs == plain.num_programs
    warm, again = told(trace=True)
    assert again == tokens
    programs = warm.num_programs
    warm.warmup()
    assert warm.num_programs == programs
    assert trace.difference(warm.trace) is None  # nor is warming up a part of it
    on_device = zip(engine.history, trace.records, strict=True)  # the engine counts those who wait on the host too
    assert trace.history == [replace(one, waiting=int(record.waiting)) for one, record in on_device]


def test_the_tokens_of_a_trace_are_those_that_came_out(story):
    """Catches: records in another order than events, or of other slots."""
    _, tokens, trace = story
    sampled: dict[str, list[int]] = {}
    for record in trace.records:
        for slot in np.flatnonzero(record.sampled):
            sampled.setdefault(trace.label(int(record.uid[slot])), []).append(int(record.token[slot]))
    assert sampled == tokens


def test_owners_of_pages_follow_from_the_records_at_every_step(story):
    """Also within bursts. Catches: a page that a part of the step gave and no list names, lists applied in another
    order than the parts run, a slot that was left and is not."""
    trace = story[2]
    for number, table in enumerate(trace.page_tables(), 1):
        record = trace.record(number)
        in_use = set(np.unique(table)) - {0}
        assert len(in_use) == record.pages_in_use
        cached = trace.cached(number)
        cached[list(in_use)] = False
        assert cached.sum() == record.pages_cached
        if number % 10:  # the first, second and third of a burst are among the others
            continue
        state = replay(trace, READER, (), number)
        table[record.finish != Finish.NOT] = 0
        assert table.tolist() == state.slots.named_pages.tolist(), number
        assert trace.cached(number).tolist() == state.prefixes.cached.tolist(), number
        assert violations(state) == []
    np.testing.assert_array_equal(trace.page_table(7), [*trace.page_tables()][6])


def test_the_lists_say_how_a_page_came(story):
    """Catches: a page that was found counted as a new one, or the other way round; a victim who is not named."""
    trace = story[2]
    before, begun = np.zeros((4, 8), int), set()
    for record, table in zip(trace.records, trace.page_tables(), strict=True):
        decisions = record.decisions
        found, taken, shared = decisions.found, decisions.taken, decisions.shared
        assert np.sum(decisions.preempted != NO_REQUEST) + np.sum(record.left != NO_REQUEST) == record.preempted
        before[decisions.restored.slot, decisions.restored.column] = decisions.restored.page
        before[np.arange(8) >= decisions.kept[:, None]] = 0
        before[found.slot, found.column], before[taken.slot, taken.column] = found.page, taken.page
        attached = before[shared.slot, shared.column] == 0  # the others take the place of equal ones
        # What a fork begins with is its parent's, and no hit.
        forks = {uid for uid in record.uid if trace.label(uid).startswith(("six.", "branch")) and uid not in begun}
        begun |= set(record.uid)
        hits = np.count_nonzero(~np.isin(record.uid[found.slot], list(forks))) + np.count_nonzero(attached)
        assert hits * trace.config.page_size == record.prefix_hits + record.recovered
        assert len({*taken.page}) == len(taken.page) and not {*taken.page} & {*found.page}
        before = table


def test_another_process_makes_the_same_trace_to_the_bit(story, tmp_path):
    """Catches: whatever differs between processes (hashes of texts, ids of objects, an order of sets, seeds of the
    clock), and what a file loses."""
    trace = story[2]
    path = tmp_path / "trace.npz"
    program = f"from support.stories import told; told()[0].trace.save({str(path)!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
    theirs = Trace.load(path)
    assert trace.difference(theirs) is None and theirs.difference(trace) is None
    assert theirs.made_by == trace.made_by
    replay(theirs, READER, ())
    again = tmp_path / "again.npz"
    theirs.save(again)
    assert trace.difference(Trace.load(again)) is None
    assert not list(tmp_path.glob("*.partial"))


def test_a_replay_ends_in_the_state_of_the_engine(story):
    """Every array. Catches: an input that the trace lacks, or one that is replayed otherwise than it was given."""
    engine, _, trace = story
    jax.tree.map(np.testing.assert_array_equal, replay(trace, READER, ()), engine.state)


def altered(trace: Trace, step: int, **changes) -> Trace:
    records = [*trace.records]
    records[step - 1] = replace(records[step - 1], **changes)
    return replace(trace, records=records)


def test_a_replay_names_the_first_difference(story):
    """Catches: a comparison that sees tokens only, or one that is not to the bit."""
    trace = story[2]
    token = trace.record(5).token.copy()
    token[1] += 1
    other = altered(altered(trace, 5, token=token), 8, running=np.int32(9))
    with pytest.raises(RuntimeError, match=rf"step 5: token\[1\] is {token[1]} and {token[1] - 1}\. Other weights"):
        replay(other, READER, ())
    replay(other, READER, (), 4)
    assert trace.difference(other) == f"step 5: token[1] is {token[1] - 1} and {token[1]}"
    logprob = np.nextafter(trace.record(3).logprob, np.float32(9))
    assert trace.difference(altered(trace, 3, logprob=logprob)).startswith("step 3: logprob[0] is")


def test_what_was_told_is_compared_too(story):
    """Catches: traces of other submissions that happen to do the same for a while."""
    trace = story[2]
    shorter = replace(trace, inputs=trace.inputs[:-1], records=trace.records[:-3])
    assert trace.difference(shorter) == f"{len(trace.inputs)} and {len(trace.inputs) - 1} inputs"
    place, batch = next((i, given.batch) for i, given in enumerate(trace.inputs) if isinstance(given, Submit))
    inputs = [*trace.inputs]
    inputs[place] = Submit(replace(batch, sampling=replace(batch.sampling, seed=batch.sampling.seed + np.uint32(1))))
    assert trace.difference(replace(trace, inputs=inputs)).startswith(f"input {place + 1}: sampling.seed[0] is")
    inputs[place] = Abort((1,))
    assert trace.difference(replace(trace, inputs=inputs)) == f"input {place + 1}: Submit and Abort"
    config = replace(trace.config, seed=5)
    assert trace.difference(replace(trace, config=config)).startswith("config: EngineConfig(")


def test_steps_that_are_not_there_are_named(story):
    trace = story[2]
    for wrong in (0, len(trace) + 1, True, 1.5):
        with pytest.raises(ValueError, match=rf"steps 1 to {len(trace)}; got step {wrong}"):
            trace.record(wrong)
        with pytest.raises(ValueError, match="steps 1 to"):
            replay(trace, READER, (), wrong)
    with pytest.raises(ValueError, match="no steps yet"):
        Trace(TIGHT, trace.shape).page_table(1)
    with pytest.raises(ValueError, match=r"EngineConfig\(trace=True\)"):
        Trace(replace(TIGHT, trace=False), trace.shape)
    with pytest.raises(ValueError, match="trace must be True or False, got 1"):
        EngineConfig(trace=1)


def test_a_step_in_words(story):
    """Catches: words that say something else than the record."""
    trace = story[2]
    first = trace.describe(1).splitlines()
    assert first[0].startswith("step 1: 13 of 16 tokens; ") and "pages: " in first[0] and first[0].endswith(" free")
    assert first[1].startswith("  slot 0: request r0 is admitted, takes pages 1, 2, 3, 4, computes 13 tokens, ")
    everything = "\n".join(trace.describe(number) for number in range(1, len(trace) + 1))
    swapped = everything.count(" is swapped out")
    assert swapped == sum(int(record.to_host.sum()) for record in trace.records) > 0
    assert everything.count(" is preempted") + swapped == sum(int(record.preempted) for record in trace.records)
    assert everything.count(" samples ") == sum(int(record.sampled.sum()) for record in trace.records)
    for word in ("brings back page", "finds page", "shares page", "waits", "ends (length)"):
        assert word in everything, word
    assert repr(trace) == f"Trace(24 requests, {len(trace)} steps, {trace.nbytes:,} bytes)"


def test_other_weights_end_what_one_decoder_can_replay(story):
    engine, _ = told()
    done = len(engine.trace)
    engine.replace_params(())
    replay(engine.trace, READER, ())  # nothing ran since
    engine.submit(replace(requests()[0], request_id="later"))
    while engine.has_work:
        engine.burst()
    with pytest.raises(ValueError, match=f"replaced after step {done}: .* until={done}"):
        replay(engine.trace, READER, ())
    replay(engine.trace, READER, (), done)


@pytest.mark.parametrize("when", ["in the step", "after it"])
def test_after_a_call_that_failed_the_trace_goes_on_from_an_empty_state(when, monkeypatch):
    """Catches: a burst that ran on the device and that the trace lacks, or the other way round."""
    engine, _ = told()
    engine.submit(replace(requests()[0], request_id="lost"))
    engine.burst()
    if when == "in the step":
        monkeypatch.setattr(engine.device, "program", lambda budget, candidates: 1 / 0)
    else:
        monkeypatch.setattr(engine.trace, "end_burst", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.burst()
    monkeypatch.undo()
    assert engine.stats().in_use_pages == 0  # the request is computed again from its beginning
    engine.submit(replace(requests()[2], request_id="later"))
    events = []
    while engine.has_work:
        events += engine.burst()
    assert events[-1].finish_reason == FinishReason.LENGTH
    jax.tree.map(np.testing.assert_array_equal, replay(engine.trace, READER, ()), engine.state)


def test_policies_are_saved_by_name(story, tmp_path):
    trace, path = story[2], tmp_path / "trace.npz"

    def mine(candidates):
        return candidates.arrival

    replace(trace, config=replace(trace.config, admission=shortest_prompt_first)).save(path)
    assert Trace.load(path).config.admission is shortest_prompt_first
    replace(trace, config=replace(trace.config, victim=mine)).save(path)
    with pytest.raises(ValueError, match=r"mine is not one of jpaged\.policy .*; give it, load\(path, victim="):
        Trace.load(path)
    assert Trace.load(path, victim=mine).config.victim is mine


def test_files_that_are_no_traces_are_refused(story, tmp_path):
    trace, path = story[2], tmp_path / "trace.npz"
    path.write_text("no")
    with pytest.raises(ValueError, match=r"is not a trace that Trace\.save wrote"):
        Trace.load(path)
    np.savez(path, other=np.zeros(3))
    with pytest.raises(ValueError, match=r"is not a trace that Trace\.save wrote"):
        Trace.load(path)
    trace.save(path)
    arrays = dict(np.load(path))
    about = json.loads(str(arrays["about"]))
    np.savez(path, **arrays | {"about": np.array(json.dumps(about | {"format": 99}))})
    with pytest.raises(ValueError, match="has format 99; this version of jpaged reads 4"):
        Trace.load(path)
    del arrays["record.token"]
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=r"by another version of jpaged: .*record\.token"):
        Trace.load(path)


def test_an_empty_trace_can_be_kept(story, tmp_path):
    empty = Trace(TIGHT, story[2].shape)
    empty.save(tmp_path / "trace.npz")
    assert empty.difference(Trace.load(tmp_path / "trace.npz")) is None
    assert int(replay(empty, READER, ()).counters.steps) == 0


def test_a_list_that_is_too_short_says_so(story):
    """Catches: pages that are dropped in silence."""
    # What is past the end of a table means nothing, also where it is what the table names later.
    before = SimpleNamespace(page_table=jnp.array([[4, 9, 9], [7, 6, 6]]), num_pages=jnp.array([0, 1]))
    after = SimpleNamespace(page_table=jnp.array([[4, 5, 9], [6, 6, 6]]), num_pages=jnp.array([2, 1]))
    whole = placed(before, after, 8)
    assert whole.page.tolist() == [4, 5, 6, 0, 0, 0, 0, 0]
    assert (whole.slot[:3].tolist(), whole.column[:3].tolist()) == ([0, 0, 1], [0, 1, 0])
    assert int(placed(before, after, 2).count) == 3
    state = story[0].state
    records = jax.tree.map(lambda a: np.asarray(a)[None], state.record)
    assert unstacked(records)[0].decisions.taken.page.size == records.decisions.taken.count[0] < 8
    decisions = replace(records.decisions, taken=replace(records.decisions.taken, count=np.array([99])))
    with pytest.raises(RuntimeError, match="a step gave slots 99 pages in one way, and its record has room for 8"):
        unstacked(replace(records, decisions=decisions))
    with pytest.raises(ValueError, match="make the state with a larger max_num_batched_tokens"):
        jax.eval_shape(lambda state: step(READER, (), state, budget=40), state)


def test_a_submission_is_the_same_when_it_is_padded_again():
    """Catches: a field that a trace forgets, and one added later that it does not carry."""
    batch = Submission.empty(6, 12)
    rng = np.random.default_rng(0)
    for array in jax.tree.leaves(batch):
        array[:] = rng.integers(0, 9, array.shape)
    batch.valid[:] = [True, False, True, True, False, False]
    batch.num_prompt_tokens[:] = [3, 12, 7, 1, 0, 0]
    batch.num_tokens[:] = np.add(batch.num_prompt_tokens, [1, 0, 0, 2, 0, 0])  # two have generated tokens
    batch.tokens[np.arange(12) >= batch.num_tokens[:, None]] = 0
    again = Submit.of(batch).padded(6, 12)
    for (path, now), before in zip(jax.tree.leaves_with_path(again), jax.tree.leaves(batch), strict=True):
        assert now[:3].tolist() == before[[0, 2, 3]].tolist(), path
    assert again.valid.tolist() == [True] * 3 + [False] * 3
    assert Submit.of(batch).batch.tokens.shape == (3, 7)
