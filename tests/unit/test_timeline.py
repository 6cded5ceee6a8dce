"""Pictures of a trace: what they contain is read back from the figure. The traces are written by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.stories import TIGHT

from jpaged.record.inputs import Abort, Restart
from jpaged.record.trace import Trace, TracedRequest
from jpaged.step import NO_REQUEST, Finish, StepRecord
from jpaged.step.decisions import Decisions, Placed
from jpaged.viz.timeline import MOST_COLUMNS, MOST_LINES, Activity, activities, condensed, plot_timeline

SHAPE = {"layers": 1, "kv_heads": 1, "head_dim": 2}
LETTERS = {" ": Activity.NONE, ".": Activity.WAITING, "h": Activity.HOLDING, "d": Activity.DECODE}
LETTERS |= {"p": Activity.PREFILL, "x": Activity.PREEMPTED}


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


#: A slot in which no request runs.
NOBODY = (NO_REQUEST, 0, False, Finish.NOT)


def add_step(
    trace: Trace, *slots: tuple[int, int, bool, Finish], preempted: tuple[int, ...] = (), swapped: tuple[int, ...] = ()
) -> None:
    """A step in which each slot has (uid, tokens computed, whether one was sampled, how it ended)."""
    size = trace.config.max_num_seqs
    slots = (*slots, *[NOBODY] * (size - len(slots)))
    uid, scheduled, sampled, finish = (np.array(column)[None] for column in zip(*slots, strict=True))
    none = Placed(*[np.zeros((1, 1), np.int32)] * 3, count=np.zeros(1, np.int32))
    victims = np.array([(*preempted, *[NO_REQUEST] * (size - len(preempted)))], np.int32)
    left = np.array([(*swapped, *[NO_REQUEST] * (size - len(swapped)))], np.int32)
    decisions = Decisions(victims, 0 * victims, none, none, none, none, np.zeros((1, 2), np.uint8))
    zeros = StepRecord.zeros(size)
    scalars = {name: np.asarray(value)[None] for name, value in vars(zeros).items() if value is not None}
    step = {"uid": uid, "scheduled": scheduled, "sampled": sampled, "finish": finish, "decisions": decisions}
    step |= {"left": left, "to_host": left != NO_REQUEST}
    trace.begin_burst(4, 1)
    trace.end_burst(StepRecord(**scalars | step))


def trace_of(requests: int, *, slots: int = 2, after: int = 0) -> Trace:
    trace = Trace(replace(TIGHT, max_num_seqs=slots), SHAPE)
    trace.inputs.append(Restart())
    for uid in range(1, requests + 1):
        trace.requests[uid] = TracedRequest(f"r{uid}", 5, after if uid == requests else 0)
    return trace


def small() -> Trace:
    trace, on = trace_of(4, after=2), Finish.NOT
    add_step(trace, (1, 3, False, on), (2, 4, True, on))
    add_step(trace, (1, 2, True, on), (2, 1, True, on))
    add_step(trace, (1, 1, True, Finish.STOP), NOBODY, preempted=(NO_REQUEST, 2))
    add_step(trace, NOBODY, (2, 6, True, on))
    add_step(trace, (3, 5, True, on), (2, 0, False, on))
    trace.inputs.append(Abort((3,)))
    add_step(trace, NOBODY, (2, 1, True, Finish.LENGTH))
    trace.inputs.append(Restart())
    add_step(trace)
    return trace


def test_what_each_request_does_in_each_step():
    """Catches: tokens of a prompt taken for decoding, in chunks and again after preemption; who waits before it is
    submitted, or after it has ended, was given up, or was lost with the state."""
    lines = ["ppd    ", "pdxphd ", "....p  ", "  .... "]
    assert activities(small()).tolist() == [[LETTERS[letter] for letter in line] for line in lines]


def test_who_waits_on_the_host_is_swapped_and_decodes_when_it_is_back():
    """Catches: a request whose pages are there drawn as one that has lost them, or as one that computes its prompt."""
    trace, on = trace_of(2), Finish.NOT
    add_step(trace, (1, 5, True, on), (2, 4, True, on))
    add_step(trace, (1, 1, True, on), swapped=(NO_REQUEST, 2))
    add_step(trace, (1, 1, True, Finish.STOP))
    add_step(trace, (2, 1, True, on))
    add_step(trace, preempted=(2,))
    letters = LETTERS | {"s": Activity.SWAPPED}
    assert activities(trace).tolist() == [[letters[letter] for letter in line] for line in ("pdd  ", "pssdx")]
    legend = [text.get_text() for text in plot_timeline(trace).axes[0].get_legend().get_texts()]
    assert legend == ["decode", "prefill", "preempted", "swapped"]


def test_a_line_for_each_request_and_a_column_for_each_step(tmp_path):
    figure = plot_timeline(small(), title="four")
    requests, slots = figure.axes
    (image,) = requests.images
    assert image.get_array().shape == (4, 7)
    assert [label.get_text() for label in requests.get_yticklabels()] == ["r1", "r2", "r3", "r4"]
    legend = [text.get_text() for text in requests.get_legend().get_texts()]
    assert legend == ["waiting", "in a slot, computes nothing", "decode", "prefill", "preempted"]
    # The colours of the legend are those of the picture.
    shown = {tuple(np.round(image.cmap(image.norm(LETTERS[letter])), 3)) for letter in ".hdpx"}
    assert shown == {tuple(np.round(patch.get_facecolor(), 3)) for patch in requests.get_legend().get_patches()}
    assert len(shown) == 5
    decode, prefill, holding = [patch.get_data().values.tolist() for patch in slots.patches]
    assert decode == [0, 1, 1, 0, 0, 1, 0]
    assert prefill == [2, 2, 1, 1, 1, 1, 0] and holding[4] == 2  # on top of one another
    assert slots.get_xlabel() == "step" and slots.get_ylabel() == "in 2 slots"
    figure.savefig(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 10_000


def test_the_legend_names_what_there_is():
    trace = trace_of(1)
    add_step(trace, (1, 3, True, Finish.LENGTH))
    legend = plot_timeline(trace).axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["prefill"]


def test_2000_requests_are_lines_without_names(tmp_path):
    """Catches: a figure that grows with the requests, names on top of one another, what is rare lost between pixels."""
    trace = trace_of(2000, slots=8)
    for first in range(0, 2000, 8):
        uids = range(first + 1, first + 9)
        for step in range(6):
            finish = Finish.STOP if step == 5 else Finish.NOT
            add_step(trace, *[(uid, 3 if step == 0 else 1, True, finish) for uid in uids])
    figure = plot_timeline(trace)
    requests = figure.axes[0]
    (image,) = requests.images
    assert image.get_array().shape == (MOST_LINES, MOST_COLUMNS)
    assert max(figure.get_size_inches()) <= 12
    assert requests.get_ylabel() == "2,000 requests, in order of submission"
    assert not any(label.get_text().startswith("r") for label in requests.get_yticklabels())
    assert image.get_extent() == [0.5, 1500.5, 1999.5, -0.5]
    assert set(np.unique(image.get_array())) >= {Activity.NONE, Activity.WAITING, Activity.DECODE, Activity.PREFILL}
    figure.savefig(tmp_path / "timeline.png")


def test_condensed_keeps_what_is_rare():
    table = np.zeros((10, 7), np.uint8)
    table[9, 6] = table[3, 2] = 5
    small = condensed(table, 4, 3)
    assert small.shape == (4, 3) and small.max() == 5 and np.count_nonzero(small) == 2
    assert condensed(table, 10, 7) is table


def test_nothing_to_draw_is_said():
    with pytest.raises(ValueError, match="nothing to draw in a trace of 1 requests and 0 steps"):
        plot_timeline(trace_of(1))
