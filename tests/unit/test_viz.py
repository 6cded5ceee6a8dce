"""The pictures: what they contain is read back from the figure."""

import subprocess
import sys

import numpy as np
import pytest

from jpaged.bench.measure import StepSample
from jpaged.viz.pages import draw_pages, page_owners, plot_occupancy

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
    figure = draw_pages(TABLE, REFCOUNTS, findable=findable, columns=4)
    colours = [square.get_facecolor() for square in figure.axes[0].patches]
    assert colours[3] == colours[8] and colours[4] == colours[7] == (1, 1, 1, 1)
    assert colours[3] not in (colours[0], colours[1], colours[4], colours[5])
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend[-3:] == ["cached (2)", "free (2)", "shared"]


def test_bad_shapes_of_the_grid_are_named():
    with pytest.raises(ValueError, match="refcounts has one axis"):
        draw_pages(TABLE, REFCOUNTS[None])
    with pytest.raises(ValueError, match=r"findable has shape \(2,\), refcounts \(9,\)"):
        draw_pages(TABLE, REFCOUNTS, findable=[True, False])
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


def test_nothing_to_plot_is_an_error():
    with pytest.raises(ValueError, match="no history"):
        plot_occupancy({}, page_size=16)
    with pytest.raises(ValueError, match="history of static holds no steps"):
        plot_occupancy({"static": []}, page_size=16)


def test_the_global_state_of_matplotlib_is_left_alone():
    code = "import sys, jpaged.viz.pages; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
