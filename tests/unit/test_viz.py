"""The pictures: what they contain is read back from the figure."""

import subprocess
import sys

import numpy as np
import pytest

from jpaged.bench.measure import StepSample
from jpaged.record.stats import StepStats
from jpaged.viz.pages import NAMED_SLOTS, draw_pages, page_owners, plot_occupancy, plot_pages

TABLE = np.array([[1, 2, 0, 0], [1, 5, 6, 0], [0, 0, 0, 0]])
REFCOUNTS = np.array([0, 2, 1, 0, 0, 1, 1, 0, 0])


def history(steps, pages):
    return [StepSample(i, 2, max(0, 3 - i), pages, 10, 2, 8) for i in range(steps)]


def test_owners_are_read_from_the_table():
    assert page_owners(TABLE, 8).tolist() == [-1, 0, 0, -1, -1, 1, 1, -1, -1]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (TABLE[0], r"this one has shape \(4,\)"),
        (TABLE + 6, "names page 12; the pool has pages 0 to 8"),
        (TABLE - 1, "names page -1"),
    ],
)
def test_a_table_that_does_not_fit_the_pool_is_refused(table, words):
    with pytest.raises(ValueError, match=words):
        page_owners(table, 8)


def test_the_grid_shows_each_page_once_with_its_owner(tmp_path):
    figure = draw_pages(TABLE, REFCOUNTS, columns=4, title="step 3", labels=["ada", "bob", "eve"])
    (axes,) = figure.axes
    squares = axes.patches
    assert len(squares) == 9
    colours = [square.get_facecolor() for square in squares]
    assert colours[1] == colours[2] != colours[5] == colours[6]
    assert colours[0] not in colours[1:]  # scratch looks like nothing else
    assert colours[3] == colours[4] == colours[7] == colours[8] == (1, 1, 1, 1)
    assert [bool(square.get_hatch()) for square in squares] == [i == 1 for i in range(9)]  # the shared page
    assert [text.get_text() for text in axes.texts] == ["x", "0", "0", "1", "1"]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["x: scratch", "0: ada (2)", "1: bob (2)", "free (4)", "shared"]
    figure.savefig(tmp_path / "pages.png")
    assert (tmp_path / "pages.png").read_bytes().startswith(b"\x89PNG")
    assert figure._repr_png_().startswith(b"\x89PNG")  # what a notebook asks for


def test_cached_pages_look_like_neither_free_nor_used_ones():
    findable = np.isin(np.arange(9), (1, 3, 8))  # the first is in use
    findable.flags.writeable = False  # as an array of JAX's is
    figure = draw_pages(TABLE, REFCOUNTS, cached=findable, columns=4)
    colours = [square.get_facecolor() for square in figure.axes[0].patches]
    assert colours[3] == colours[8] and colours[4] == colours[7] == (1, 1, 1, 1)
    assert colours[3] not in (colours[0], colours[1], colours[4], colours[5])
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend[-3:] == ["cached (2)", "free (2)", "shared"]


def test_bad_shapes_of_the_grid_are_named():
    with pytest.raises(ValueError, match="refcounts has one axis"):
        draw_pages(TABLE, REFCOUNTS[None])
    with pytest.raises(ValueError, match=r"cached has shape \(2,\), refcounts \(9,\)"):
        draw_pages(TABLE, REFCOUNTS, cached=[True, False])
    with pytest.raises(ValueError, match="columns must be at least 1, got 0"):
        draw_pages(TABLE, REFCOUNTS, columns=0)


def test_occupancy_overlays_the_runs_in_token_slots(tmp_path):
    runs = {"continuous": history(4, pages=2), "static": history(6, pages=20)}
    figure = plot_occupancy(runs, page_size={"continuous": 8, "static": 4}, title="a mix")
    memory, requests = figure.axes
    one, other = memory.lines
    assert one.get_ydata().tolist() == [16] * 4
    assert other.get_ydata().tolist() == [80] * 6
    assert one.get_linestyle() != other.get_linestyle()
    assert one.get_color() != other.get_color()
    labels = [text.get_text() for text in memory.get_legend().get_texts()]
    assert "continuous: holds tokens (62% of reserved)" in labels
    assert "static: holds tokens (12% of reserved)" in labels
    assert len(requests.lines) == 4  # running and waiting of both
    figure.savefig(tmp_path / "occupancy.png")
    assert (tmp_path / "occupancy.png").stat().st_size > 10_000


def pooled(in_use, cached, tokens):
    """Steps of a pool with pages of 4 tokens."""
    each = zip(in_use, cached, tokens, strict=True)
    return [StepStats(i, 2, 0, use, held, 4, 8, 0, 0, kept) for i, (use, kept, held) in enumerate(each, 1)]


def test_the_pool_over_time_stands_above_the_owners_of_its_pages(tmp_path):
    """Catches: areas that are not shares of the pool, a grid of another step than the one that is marked."""
    history = pooled([2, 5, 4], [0, 1, 3], [5, 18, 16])
    findable = np.isin(np.arange(9), (1, 3))
    figure = plot_pages(history, TABLE, findable, page_size=4, step=3, labels=["ada", "bob", "eve"], title="step 3")
    over_time, grid = figure.axes
    stored, in_use, cached = [area.get_data() for area in over_time.patches]
    assert stored.values.tolist() == [1.25, 4.5, 4] and stored.edges.tolist() == [0.5, 1.5, 2.5, 3.5]
    assert (in_use.values.tolist(), in_use.baseline.tolist()) == ([2, 5, 4], stored.values.tolist())
    assert (cached.values.tolist(), cached.baseline.tolist()) == ([2, 6, 7], [2, 5, 4])
    assert over_time.get_title(loc="right") == "at most 5 of 8 pages in use, on average 4; 89% of that holds tokens"
    assert over_time.get_ylabel() == "pages" and grid.get_title(loc="left") == "step 3"
    assert over_time.lines[-1].get_xdata()[0] == 3  # the step that is shown
    assert [text.get_text() for text in grid.texts] == ["x", "0", "0", "1", "1"]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["x: scratch", "0: ada (2)", "1: bob (2)", "cached (1)", "free (3)", "shared"]
    figure.savefig(tmp_path / "pages.png")
    nothing = plot_pages([], TABLE * 0, findable * False, page_size=4)
    assert [text.get_text() for text in nothing.legends[0].get_texts()] == ["x: scratch", "free (8)"]


def test_a_short_run_in_a_large_pool_can_be_seen():
    """Catches: a line at zero above a white map, because both are scaled to a pool of which a run used 1 %."""
    history = pooled([2, 5, 4], [0, 1, 3], [5, 18, 16])
    cached = np.isin(np.arange(1456), (1, 3))
    figure = plot_pages(history, TABLE, cached, page_size=4, title="now")
    over_time, grid = figure.axes
    assert 7 < over_time.get_ylim()[1] < 10
    assert "of 1,455 pages" in over_time.get_title(loc="right")
    shown = len(grid.patches)
    assert shown < 64 and grid.get_title(loc="left") == f"now (pages {shown} to 1455 are free)"
    assert "free (1450)" in [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(("slots", "pages"), [(64, 255), (64, 30_000), (3, 2000)])
def test_a_large_pool_is_read_as_well(slots, pages, tmp_path):
    """Catches: a figure as large as the pool, thousands of squares drawn one by one, a legend longer than the page or
    one that leaves slots out in silence."""
    table = np.arange(1, 1 + slots * 3).reshape(slots, 3)
    cached = np.arange(pages + 1) == pages  # the last one, so that all are drawn
    figure = plot_pages(pooled([3 * slots], [1], [12 * slots]), table, cached, page_size=4, step=1)
    width, height = figure.get_size_inches()
    assert width == 11 and height < 11
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    if pages == 255:
        assert len(figure.axes[1].patches) == 256
        assert legend[-3] == f"... and {64 - NAMED_SLOTS} more ({3 * (64 - NAMED_SLOTS)})"
    else:
        assert figure.axes[1].images[0].get_array().shape[0] * 2 < figure.axes[1].images[0].get_array().shape[1]
        few = [f"{slot}: slot {slot} (3)" for slot in range(slots)]
        assert legend[1:-2] == (few if slots == 3 else ["pages of 64 slots, in 6 colours by turns (192)"])
    assert legend[-2:] == ["cached (1)", f"free ({pages - 3 * slots - 1})"]
    figure.savefig(tmp_path / "pages.png")


def test_nothing_to_plot_is_an_error():
    with pytest.raises(ValueError, match="no history"):
        plot_occupancy({}, page_size=16)
    with pytest.raises(ValueError, match="history of static holds no steps"):
        plot_occupancy({"static": []}, page_size=16)


def test_the_global_state_of_matplotlib_is_left_alone():
    code = "import sys, jpaged.viz.pages; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
