"""Pictures of the pool: how full it was over the steps, and who owns which page now.

Colours are those of Okabe and Ito, which people with any common kind of colour blindness can tell apart;
lines differ in their dashes too, and pages carry the number of their slot.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

#: Okabe and Ito's colours, without the yellow that white paper swallows
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
FREE_COLOUR = "#FFFFFF"
CACHED_COLOUR = "#DDDDDD"
SCRATCH_COLOUR = "#999999"
EDGE_COLOUR = "#444444"
SHARED_HATCH = "///"
LINE_STYLES = ("-", "--", "-.", ":")
#: more pages than this are drawn without the number of their slot
NUMBERED_PAGES = 256


class Picture(Figure):
    """A Figure that a notebook shows where it is the value of a cell, also when pyplot was never imported."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


class StepLike(Protocol):
    """What a plot reads of one step: `bench.measure.StepSample` and the engine's own record have it."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def pages_in_use(self) -> int: ...
    @property
    def tokens_in_pages(self) -> int: ...


def plot_occupancy(
    histories: Mapping[str, Sequence[StepLike]], *, page_size: int | Mapping[str, int], title: str = ""
) -> Figure:
    """Token slots reserved and really used, and requests running, over the steps of one or more runs.

    Args:
        histories: by name of the engine, its steps in order; they are overlaid.
        page_size: token slots in a page, one for all or one by name.
        title: of the figure.

    Raises:
        ValueError: no history, or an empty one.
    """
    if not histories:
        raise ValueError("there is no history to plot")
    figure = Picture(figsize=(11, 6), layout="constrained")
    memory, requests = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for i, (name, history) in enumerate(histories.items()):
        if not history:
            raise ValueError(f"the history of {name} holds no steps")
        size = page_size if isinstance(page_size, int) else page_size[name]
        colour, dashes = COLOURS[i % len(COLOURS)], LINE_STYLES[i % len(LINE_STYLES)]
        steps = np.arange(1, len(history) + 1)
        reserved = np.array([s.pages_in_use * size for s in history])
        used = np.array([s.tokens_in_pages for s in history])
        share = used.sum() / max(1, reserved.sum())
        memory.plot(steps, reserved, dashes, color=colour, label=f"{name}: reserved")
        label = f"{name}: holds tokens ({share:.0%} of reserved)"
        memory.fill_between(steps, used, color=colour, alpha=0.35, linewidth=0, label=label)
        requests.plot(steps, [s.running for s in history], dashes, color=colour, label=f"{name}: running")
        waiting = [s.waiting for s in history]
        if any(waiting):
            requests.plot(steps, waiting, ":", color=colour, linewidth=1, label=f"{name}: waiting")
    memory.set_ylabel("token slots of the KV pool")
    requests.set_ylabel("requests")
    requests.set_xlabel("step")
    for axes in (memory, requests):
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=1)
        axes.grid(True, alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)
    if title:
        figure.suptitle(title)
    return figure


def page_owners(page_table: Any, num_pages: int, *, scratch: int = 0) -> np.ndarray:
    """Who owns each page of the pool, scratch included: `[num_pages + 1]` int32, the lowest slot that names
    the page, or -1 for none.

    Args:
        page_table: `[slots, max_pages]` page numbers, `scratch` where unused.
        num_pages: pages that requests can own.
        scratch: the page that padding is written to.

    Raises:
        ValueError: the table has another rank, or names a page the pool does not have.
    """
    table = np.asarray(page_table)
    if table.ndim != 2:
        raise ValueError(f"a page table has two axes, [slots, max_pages]; this one has shape {table.shape}")
    if table.size and (table.min() < 0 or table.max() > num_pages):
        bad = table.min() if table.min() < 0 else table.max()
        raise ValueError(f"the table names page {bad}; the pool has pages 0 to {num_pages}")
    owners = np.full(num_pages + 1, -1, np.int32)
    for slot in range(table.shape[0] - 1, -1, -1):  # the lowest slot is written last
        named = table[slot]
        owners[named[named != scratch]] = slot
    return owners


def draw_pages(
    page_table: Any,
    refcounts: Any,
    *,
    findable: Any = (),
    labels: Sequence[str] | None = None,
    columns: int = 16,
    scratch: int = 0,
    title: str = "",
) -> Figure:
    """The pool as a grid, one square a page, coloured by the slot that owns it.

    Args:
        page_table: `[slots, max_pages]` page numbers in order, `scratch` where unused.
        refcounts: `[num_pages + 1]` how many tables name each page; shared pages (2 and more) are hatched.
        findable: `[num_pages + 1]` bool, whether another request can find what the page holds
            (`state.prefixes.findable`); where no table names such a page it is cached, and light grey. Left out:
            nothing is cached.
        labels: names of the slots for the legend; by default `slot 0`, `slot 1`, ...
        columns: squares in a line.
        scratch: the page that padding is written to, drawn grey.
        title: of the figure.

    Raises:
        ValueError: shapes that do not fit together, or a page the pool does not have.
    """
    counts = np.asarray(refcounts)
    if counts.ndim != 1 or counts.size < 1:
        raise ValueError(f"refcounts has one axis, [num_pages + 1]; got shape {counts.shape}")
    cached = np.asarray(findable, bool) if len(findable) else np.zeros(counts.shape, bool)
    if cached.shape != counts.shape:
        raise ValueError(f"findable has shape {cached.shape}, refcounts {counts.shape}")
    if columns < 1:
        raise ValueError(f"columns must be at least 1, got {columns}")
    total = counts.size
    owners = page_owners(page_table, total - 1, scratch=scratch)
    cached = cached & (owners < 0)
    lines = -(-total // columns)
    figure = Picture(figsize=(0.45 * columns + 2.2, 0.45 * lines + 0.9), layout="constrained")
    axes = figure.subplots()
    for page in range(total):
        line, column = divmod(page, columns)
        owner = int(owners[page])
        nobodys = CACHED_COLOUR if cached[page] else FREE_COLOUR
        colour = SCRATCH_COLOUR if page == scratch else nobodys if owner < 0 else _colour(owner)
        hatch = SHARED_HATCH if counts[page] > 1 else None
        square = Rectangle((column, line), 0.92, 0.92, facecolor=colour, edgecolor=EDGE_COLOUR, hatch=hatch)
        axes.add_patch(square)
        if total <= NUMBERED_PAGES and (owner >= 0 or page == scratch):
            text = "x" if page == scratch else str(owner)
            axes.text(column + 0.46, line + 0.46, text, ha="center", va="center", fontsize=8, color="white")
    axes.set_xlim(-0.1, columns)
    axes.set_ylim(lines, -0.1)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([0.46 + line for line in range(lines)], [str(line * columns) for line in range(lines)])
    axes.set_ylabel("first page of the line")
    for side in axes.spines.values():
        side.set_visible(False)
    handles = [Patch(facecolor=SCRATCH_COLOUR, edgecolor=EDGE_COLOUR, label="x: scratch")]
    for slot in sorted(set(owners[owners >= 0].tolist()))[:24]:
        name = labels[slot] if labels is not None else f"slot {slot}"
        label = f"{slot}: {name} ({int((owners == slot).sum())})"
        handles.append(Patch(facecolor=_colour(slot), edgecolor=EDGE_COLOUR, label=label))
    free = int((owners < 0).sum()) - 1 - int(cached.sum())
    if cached.any():
        handles.append(Patch(facecolor=CACHED_COLOUR, edgecolor=EDGE_COLOUR, label=f"cached ({int(cached.sum())})"))
    handles.append(Patch(facecolor=FREE_COLOUR, edgecolor=EDGE_COLOUR, label=f"free ({free})"))
    if (counts > 1).any():
        handles.append(Patch(facecolor=FREE_COLOUR, edgecolor=EDGE_COLOUR, hatch=SHARED_HATCH, label="shared"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)
    if title:
        axes.set_title(title, loc="left")
    return figure


def _colour(slot: int) -> str:
    return COLOURS[slot % len(COLOURS)]
