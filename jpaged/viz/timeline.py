"""Requests over the steps of a trace: when each waited, computed its prompt, decoded, or had lost its slot."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jpaged.record.inputs import Abort, Burst, Restart
from jpaged.record.trace import Trace
from jpaged.step import NO_REQUEST, Finish
from jpaged.viz.pages import CACHED_COLOUR, COLOURS, EDGE_COLOUR, SCRATCH_COLOUR, Picture, steps_filled

#: more requests than this are drawn without their names, and without gaps between them
NAMED_REQUESTS = 60
#: lines and columns that a picture has at most; see `condensed`
MOST_LINES, MOST_COLUMNS = 800, 1200


class Activity(IntEnum):
    """What a request does in a step. Where a pixel stands for several, the last of these is seen."""

    NONE = 0  # not submitted yet, or ended
    WAITING = 1  # in the queue, on the device or on the host
    HOLDING = 2  # has a slot and computes nothing: another computes the page that it wants, or the budget is spent
    DECODE = 3  # computes the token that it sampled last
    PREFILL = 4  # computes tokens of its prompt, or again those that it had computed before it was preempted
    PREEMPTED = 5  # has lost its slot and waits for one
    SWAPPED = 6  # as well, and its pages are on the host


NAMES = {
    Activity.WAITING: "waiting",
    Activity.HOLDING: "in a slot, computes nothing",
    Activity.DECODE: "decode",
    Activity.PREFILL: "prefill",
    Activity.PREEMPTED: "preempted",
    Activity.SWAPPED: "swapped",
}
#: blue is work, grey is none
ACTIVITY_COLOURS = {
    Activity.NONE: "#FFFFFF",
    Activity.WAITING: CACHED_COLOUR,
    Activity.HOLDING: SCRATCH_COLOUR,
    Activity.DECODE: COLOURS[4],
    Activity.PREFILL: COLOURS[0],
    Activity.PREEMPTED: COLOURS[1],
    Activity.SWAPPED: COLOURS[2],
}


def activities(trace: Trace) -> np.ndarray:
    """What each request did in each step, `[requests, steps]` uint8, an `Activity`; requests in the order in which they
    were submitted."""
    uids = np.array([*trace.requests], np.int64)
    row = np.zeros(uids.max(initial=0) + 1, np.int64)
    row[uids] = np.arange(len(uids))
    after = np.array([request.after for request in trace.requests.values()], np.int64)
    gone, lost, swapped, decodes = (np.zeros(len(uids), bool) for _ in range(4))
    out = np.zeros((len(uids), len(trace)), np.uint8)
    step = 0
    for told in trace.inputs:
        match told:
            case Restart():
                gone |= after < step
            case Abort(named):
                gone[row[list(named)]] = True
            case Burst(_, steps):
                for record in trace.records[step : step + steps]:
                    assert record.decisions is not None
                    preempted, left = np.asarray(record.decisions.preempted), np.asarray(record.left)
                    nowhere = np.zeros(len(preempted), bool)
                    for uid, on_host in ((left, np.asarray(record.to_host)), (preempted, nowhere)):
                        victims, stored = row[uid[uid != NO_REQUEST]], on_host[uid != NO_REQUEST]
                        lost[victims], swapped[victims] = True, stored
                        decodes[victims] &= stored
                    waits = np.where(swapped, Activity.SWAPPED, np.where(lost, Activity.PREEMPTED, Activity.WAITING))
                    out[:, step] = np.where(gone | (after > step), Activity.NONE, waits)
                    runs = np.asarray(record.uid) != NO_REQUEST
                    who, computes = row[record.uid[runs]], np.asarray(record.scheduled)[runs] > 0
                    lost[who] = swapped[who] = False
                    works = np.where(decodes[who], Activity.DECODE, Activity.PREFILL)
                    out[who, step] = np.where(computes, works, Activity.HOLDING)
                    decodes[who] = np.where(computes, np.asarray(record.sampled)[runs], decodes[who])
                    gone[who] = np.asarray(record.finish)[runs] != Finish.NOT
                    step += 1
    return out


def condensed(table: np.ndarray, lines: int, columns: int) -> np.ndarray:
    """`table` with at most so many lines and columns: each of them stands for several, and shows the largest number."""
    for axis, most in enumerate((lines, columns)):
        if (size := table.shape[axis]) > most:
            begins = np.arange(most) * size // most
            table = np.maximum.reduceat(table, begins, axis=axis)
    return table


def plot_timeline(trace: Trace, *, title: str = "") -> Figure:
    """A line for each request and a column for each step, coloured by what it does; below, how many have slots.

    With many requests or steps a pixel stands for several, and shows the rarest thing that they do: swapped before
    preempted before prefill before decode.

    Raises:
        ValueError: nothing was run.
    """
    table = activities(trace)
    count, steps = table.shape
    if not table.size:
        raise ValueError(f"there is nothing to draw in a trace of {count} requests and {steps} steps")
    named = count <= NAMED_REQUESTS
    height = np.clip(0.22 * count, 1.5, 7.5)
    figure = Picture(figsize=(11, height + 2.6), layout="constrained")
    requests, slots = figure.subplots(2, 1, sharex=True, height_ratios=(height, 1.6))

    colours = ListedColormap([ACTIVITY_COLOURS[activity] for activity in Activity])
    requests.imshow(
        condensed(table, MOST_LINES, MOST_COLUMNS), cmap=colours, vmin=0, vmax=len(Activity) - 1, aspect="auto",
        interpolation="nearest", extent=(0.5, steps + 0.5, count - 0.5, -0.5),
    )  # fmt: skip
    if named:
        requests.set_yticks(range(count), [request.request_id for request in trace.requests.values()], fontsize="small")
        requests.hlines(np.arange(count - 1) + 0.5, 0.5, steps + 0.5, color="white", linewidth=2)
        requests.set_ylabel("request")
    else:
        requests.set_ylabel(f"{count:,} requests, in order of submission")
    shown = [activity for activity in NAMES if (table == activity).any()]
    handles = [Patch(facecolor=ACTIVITY_COLOURS[a], edgecolor=EDGE_COLOUR, label=NAMES[a]) for a in shown]
    requests.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(shown), frameon=False)

    below = np.zeros(steps, np.int64)
    for activity in (Activity.DECODE, Activity.PREFILL, Activity.HOLDING):
        top = below + np.sum(table == activity, axis=0)
        steps_filled(slots, top, below, ACTIVITY_COLOURS[activity])
        below = top
    slots.axhline(trace.config.max_num_seqs, color=EDGE_COLOUR, linewidth=1, linestyle=":")
    slots.set_ylim(0, 1.08 * trace.config.max_num_seqs)
    slots.set_ylabel(f"in {trace.config.max_num_seqs} slots")
    slots.set_xlabel("step")
    slots.set_xlim(0.5, steps + 0.5)
    if title:
        figure.suptitle(title)
    return figure
