"""Pictures of the pool: how full it was over the steps, and which request owns which page now.

Colours are those of Okabe and Ito, which people with any common kind of colour blindness can tell apart;
lines differ in their dashes too, and pages carry the number of their slot.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from jpaged.pool import SCRATCH_PAGE

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
#: more pages than this are pixels of one image, not squares
SQUARE_PAGES = 1024
#: slots that a legend names; of the others it says how many there are. Where pages have no numbers, it names none that
#: share a colour
NAMED_SLOTS = 24
#: pages that `plot_pages` draws at least, free ones at the end of the pool included
_LEAST_SHOWN = 32


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


class PooledStep(StepLike, Protocol):
    """What `plot_pages` reads besides: `StepStats` has it."""

    @property
    def pages_cached(self) -> int: ...


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
    """The owner of each page of the pool, scratch included: `[num_pages + 1]` int32, the lowest slot that names
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
    cached: Any = (),
    labels: Sequence[str] | None = None,
    columns: int = 16,
    scratch: int = 0,
    title: str = "",
) -> Figure:
    """The pool as a grid, one square a page, coloured by the slot that owns it.

    Args:
        page_table: `[slots, max_pages]` page numbers in order, `scratch` where unused.
        refcounts: `[num_pages + 1]` how many tables name each page; shared pages (2 and more) are hatched.
        cached: `[num_pages + 1]` bool, whether another request can find what the page holds
            (`state.prefixes.cached`); where no table names such a page it is cached, and light grey. Left out:
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
    cached = np.asarray(cached, bool) if len(cached) else np.zeros(counts.shape, bool)
    if cached.shape != counts.shape:
        raise ValueError(f"cached has shape {cached.shape}, refcounts {counts.shape}")
    if columns < 1:
        raise ValueError(f"columns must be at least 1, got {columns}")
    owners = page_owners(page_table, counts.size - 1, scratch=scratch)
    lines = -(-counts.size // columns)
    figure = Picture(figsize=(0.45 * columns + 2.2, 0.45 * lines + 0.9), layout="constrained")
    _draw_grid(figure.subplots(), owners, counts, cached & (owners < 0), labels, columns, scratch)
    if title:
        figure.axes[0].set_title(title, loc="left")
    return figure


def plot_pages(
    history: Sequence[PooledStep],
    page_table: Any,
    cached: Any,
    *,
    page_size: int,
    step: int | None = None,
    labels: Sequence[str] | None = None,
    title: str = "",
) -> Figure:
    """How the pool was shared out over the steps, and the owner of each page in one of them.

    Args:
        history: the steps in order.
        page_table, cached, labels: as in `draw_pages`, of the step whose pages are shown.
        page_size: token slots in a page.
        step: the number of that step, to mark it in the history; None: it is not one of them.
        title: of the grid.
    """
    cached = np.asarray(cached, bool)
    owners = page_owners(page_table, cached.size - 1)
    named = np.asarray(page_table)
    counts = np.bincount(named[named != SCRATCH_PAGE], minlength=cached.size)
    num_pages = cached.size - 1
    # Of a large pool the free end is left out, so that the rest can be seen.
    used = np.flatnonzero((owners >= 0) | cached)
    shown = min(cached.size, max(_LEAST_SHOWN, 1 + int(used.max(initial=0))))
    owners, counts, cached = owners[:shown], counts[:shown], cached[:shown]
    if shown <= num_pages:
        title = f"{title} (pages {shown} to {num_pages} are free)".strip()
    columns = max(16, 1 << int(np.ceil(np.log2(4 * shown) / 2)))  # about four times as wide as high
    lines = -(-shown // columns)
    height = float(np.clip(10 * lines / columns, 0.6, 4))
    figure = Picture(figsize=(11, height + 3.2), layout="constrained")
    over_time, grid = figure.subplots(2, 1, height_ratios=(2.4, height))
    _draw_occupancy(over_time, history, num_pages, page_size)
    if step is not None:
        over_time.axvline(step, color=EDGE_COLOUR, linestyle="--", linewidth=1)
    hidden = num_pages + 1 - shown
    _draw_grid(grid, owners, counts, cached & (owners < 0), labels, columns, SCRATCH_PAGE, hidden)
    grid.set_anchor("NW")
    legend, across = grid.get_legend(), 5
    assert legend is not None
    handles = legend.legend_handles
    legend.remove()
    figure.legend(handles=handles, loc="outside lower left", ncols=across, fontsize="small", frameon=False)
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(handles) // across))
    grid.set_ylabel("page")
    grid.set_title(title, loc="left")
    return figure


def steps_filled(axes: Axes, top: np.ndarray, bottom: Any, colour: str, label: str = "") -> None:
    """An area between two numbers of each step, the first of which is 1."""
    edges = np.arange(len(top) + 1) + 0.5
    axes.stairs(top, edges, baseline=bottom, fill=True, color=colour, linewidth=0, label=label)


def _draw_occupancy(axes: Axes, history: Sequence[PooledStep], num_pages: int, page_size: int) -> None:
    """Shares of the pool's pages over the steps."""
    stored = np.array([step.tokens_in_pages for step in history], float) / page_size
    in_use = np.array([step.pages_in_use for step in history], float)
    cached = in_use + np.array([step.pages_cached for step in history])
    share = stored.sum() / max(1.0, in_use.sum())
    if len(history):
        steps_filled(axes, stored, np.zeros_like(stored), COLOURS[0], "in use, holds tokens")
        steps_filled(axes, in_use, stored, COLOURS[4], "in use, empty yet")
        steps_filled(axes, cached, in_use, CACHED_COLOUR, "cached")
        axes.set_xlim(0.5, len(history) + 0.5)
        words = (
            f"at most {int(in_use.max()):,} of {num_pages:,} pages in use, on average {in_use.mean():,.0f}; "
            f"{share:.0%} of that holds tokens"
        )
        axes.set_title(words, loc="right", fontsize="small")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize="small", frameon=False)
    # Scaled to the peak: a short run in a large pool would be a line at zero. The pool's size is in the title.
    axes.axhline(num_pages, color=EDGE_COLOUR, linewidth=1, linestyle=":")
    axes.set_ylim(
        0, min(1.05 * num_pages, 1.15 * max(1.0, cached.max(initial=0))) if len(history) else 1.05 * num_pages
    )
    axes.set_ylabel("pages")
    axes.set_xlabel("step")


def _draw_grid(
    axes: Axes,
    owners: np.ndarray,
    counts: np.ndarray,
    cached: np.ndarray,
    labels: Sequence[str] | None,
    columns: int,
    scratch: int,
    hidden: int = 0,
) -> None:
    """One square a page, by owner. `cached` pages have no owner; `hidden` free pages are not drawn."""
    total = counts.size
    lines = -(-total // columns)
    colours = [CACHED_COLOUR if cached[p] else FREE_COLOUR if o < 0 else _colour(o) for p, o in enumerate(owners)]
    colours[scratch] = SCRATCH_COLOUR
    shared = np.flatnonzero(counts > 1)
    if total <= SQUARE_PAGES:
        for page, colour in enumerate(colours):
            line, column = divmod(page, columns)
            hatch = SHARED_HATCH if counts[page] > 1 else None
            axes.add_patch(Rectangle((column, line), 0.92, 0.92, facecolor=colour, edgecolor=EDGE_COLOUR, hatch=hatch))
            if total <= NUMBERED_PAGES and (owners[page] >= 0 or page == scratch):
                text = "x" if page == scratch else str(owners[page])
                axes.text(column + 0.46, line + 0.46, text, ha="center", va="center", fontsize=8, color="white")
    else:
        image = np.ones((lines * columns, 3))
        image[:total] = to_rgba_array(colours)[:, :3]
        axes.imshow(image.reshape(lines, columns, 3), interpolation="nearest", extent=(0, columns, lines, 0))
        axes.plot(shared % columns + 0.5, shared // columns + 0.5, ".", color="black", markersize=1.5)
    axes.set_xlim(-0.1, columns)
    axes.set_ylim(lines, -0.1)
    axes.set_aspect("equal")
    axes.set_xticks([])
    ticks = range(0, lines, 1 if total <= SQUARE_PAGES else -(-lines // 8))
    axes.set_yticks([0.46 + line for line in ticks], [str(line * columns) for line in ticks])
    axes.set_ylabel("first page of the line")
    for side in axes.spines.values():
        side.set_visible(False)
    handles = [Patch(facecolor=SCRATCH_COLOUR, edgecolor=EDGE_COLOUR, label="x: scratch")]
    slots = sorted(set(owners[owners >= 0].tolist()))
    if total > NUMBERED_PAGES and len(slots) > len(COLOURS):  # no legend could tell them apart
        words = f"pages of {len(slots)} slots, in {len(COLOURS)} colours by turns ({int((owners >= 0).sum())})"
        handles.append(Patch(facecolor=COLOURS[0], edgecolor=EDGE_COLOUR, label=words))
        slots = []
    for slot in slots[:NAMED_SLOTS]:
        name = labels[slot] if labels is not None else f"slot {slot}"
        label = f"{slot}: {name} ({int((owners == slot).sum())})"
        handles.append(Patch(facecolor=_colour(slot), edgecolor=EDGE_COLOUR, label=label))
    if others := slots[NAMED_SLOTS:]:
        pages = int(np.isin(owners, others).sum())
        handles.append(Patch(facecolor="none", edgecolor="none", label=f"... and {len(others)} more ({pages})"))
    if cached.any():
        handles.append(Patch(facecolor=CACHED_COLOUR, edgecolor=EDGE_COLOUR, label=f"cached ({int(cached.sum())})"))
    free = int((owners < 0).sum()) - 1 - int(cached.sum()) + hidden
    handles.append(Patch(facecolor=FREE_COLOUR, edgecolor=EDGE_COLOUR, label=f"free ({free})"))
    if len(shared):
        handles.append(Patch(facecolor=FREE_COLOUR, edgecolor=EDGE_COLOUR, hatch=SHARED_HATCH, label="shared"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)


def _colour(slot: int) -> str:
    return COLOURS[slot % len(COLOURS)]
