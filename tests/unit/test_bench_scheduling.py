"""`python -m jpaged.bench.scheduling` at small sizes: that what it times is what it says, and what it prints."""

import json

import numpy as np
import pytest

from jpaged.bench import scheduling
from jpaged.bench.scheduling import Sizes, full_of_work, main, measure
from jpaged.step import violations

SMALL = Sizes(slots=4, queued=70, pages=60, max_model_len=128)
OPTIONS = ["--slots", "4", "--queued", "70", "--pages", "60", "--max-model-len", "128", "--steps", "5"]


def test_all_slots_decode_and_the_queue_is_full():
    """Catches: a state that no engine would be in, requests that share pages, one that still has a prompt to compute.
    The requests do not fit in one submission."""
    prompt_tokens = SMALL.prompt_tokens(5)
    state = full_of_work(SMALL, prompt_tokens)
    assert violations(state) == []
    requests, slots = state.requests, state.slots
    assert np.asarray(slots.occupied).all() and int(state.record.waiting) == 70
    running = np.asarray(slots.request)
    assert (np.asarray(requests.num_tokens)[running] - np.asarray(slots.num_computed_tokens) == 1).all()
    assert (np.asarray(requests.num_prompt_tokens) == prompt_tokens).all()
    assert int(state.refcount[1:].max()) == 1


def test_it_prints_a_row_of_each_size_and_ends_with_json(capsys, tmp_path):
    """Catches: a count or a time under another's heading, a report that cannot be read, steps that were not timed."""
    main([*OPTIONS, "--json", str(tmp_path / "rows.json")])
    *lines, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found == json.loads((tmp_path / "rows.json").read_text())
    (row,) = found["rows"]
    assert {name: row[name] for name in ("slots", "queued", "pages", "max_model_len", "steps")} == {
        "slots": 4, "queued": 70, "pages": 60, "max_model_len": 128, "steps": 5,
    }  # fmt: skip
    assert 0 < row["step_least_ms"] <= row["step_ms"] < 1000
    assert 0 < row["demand_least_ms"] <= row["demand_ms"] < 1000
    assert 4 * row["prompt_tokens"] / 16 < row["pages_in_use"] <= 60
    assert row["step"]["conditionals"] == 2 and row["demand"]["conditionals"] == 0
    assert max(map(len, lines)) <= 80
    head, cells = (line.split() for line in lines if len(line.split()) == 12 and "." in line and "(" not in line)
    columns = dict(zip(head[:3] + head[7:], cells[:3] + cells[7:], strict=True))
    step, demand = row["step"], row["demand"]
    assert columns == {
        "slots": "4", "queued": "70", "pages": "60", "cond.": "2/0",
        "loops": f"{len(step['known_loops'])}/{len(demand['known_loops'])}", "open": "0/0", "copies": "0/0",
        "KiB": f"{-(-step['temporary_bytes'] // 1024):,}",
    }  # fmt: skip
    times = [f"{row[name]:.2f}" for name in ("step_ms", "step_least_ms", "demand_ms", "demand_least_ms")]
    assert cells[3:7] == times


def test_a_step_that_is_not_full_of_work_is_refused(monkeypatch):
    """Catches: times of steps in which slots stand empty, or in which a request was preempted or ended."""
    monkeypatch.setattr(scheduling, "full_of_work", lambda sizes, prompt_tokens: sizes.state())
    with pytest.raises(RuntimeError, match=r"not all slots decode, or the queue is not full: \{'sampled': 0, 'wai"):
        measure(SMALL, steps=5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--pages", "7"],
            "slots that decode for 5 steps need 8 pages of 16 tokens and a max_model_len of 27, got 7",
        ),
        (["--pages", "7", "--max-model-len", "128"], "a request of max_model_len 128 needs 8 pages"),
        (["--max-model-len", "20"], "and a max_model_len of 27, got 60 and 20"),
        (["--slots", "0"], "max_num_seqs must be an integer of at least 1 or None, got 0"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
    ],
)
def test_sizes_that_cannot_be_full_of_work_are_refused_before_anything_is_measured(options, words, capsys, monkeypatch):
    """Catches: an hour of measuring that ends with an error of the last row."""
    monkeypatch.setattr(scheduling, "measure", None)
    with pytest.raises(SystemExit):
        main([*OPTIONS[:6], "--max-model-len", "64", "--steps", "5", *options])
    assert words in " ".join(capsys.readouterr().err.split())


def test_the_sizes_of_the_table_have_room_for_its_steps():
    """Catches: an arithmetic of prompts that leaves no page for the requests to grow into."""
    for slots in (16, 64, 256):
        for pages in (1000, 30_000):
            prompt_tokens = Sizes(slots, 64, pages).prompt_tokens(20)
            assert slots * -(-(prompt_tokens * 17 // 16 + 24) // 16) <= pages
