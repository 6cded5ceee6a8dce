"""What an engine tells of itself: rounded, as a table where a notebook shows one, and as arrays."""

import numpy as np
import pytest

from jpaged.record.stats import EngineStats, History, StepStats

STATS = EngineStats(
    steps=1234, useful_row_steps=3000, wasted_row_steps=1000, preemptions=2, total_pages=1455, free_pages=1400,
    in_use_pages=50, running=3, waiting=4, num_programs=5, compile_seconds=12.345678901234, cached_pages=5,
    prefix_queries=200, prefix_hits=50,
)  # fmt: skip


def test_the_last_line_of_a_cell_is_a_rounded_table():
    """Catches: a dataclass with 14 digits, cut off at the edge of the page."""
    for shown in (repr(STATS), str(STATS), STATS._repr_html_()):
        assert "12.3 s" in shown and "12.34" not in shown
        assert "1,234" in shown and "50 of 200 (25%)" in shown and "25% of them wasted" in shown
    assert max(len(line) for line in repr(STATS).splitlines()) <= 80
    assert STATS._repr_html_().count("<tr>") == len(repr(STATS).splitlines())


def test_the_history_is_a_list_and_arrays(monkeypatch):
    """Catches: a history that cannot be plotted without a loop, and a missing pandas that is not named."""
    rest = (0, 2, 20, 4, 8, 1, 0)  # waiting, pages in use, tokens in them, scheduled, budget, admitted, preempted
    history = History(StepStats(number, number + 1, *rest) for number in (1, 2, 3))
    assert len(history) == 3 and history[-1].running == 4 and len(history[1:]) == 2 and "3 steps" in repr(history)
    arrays = history.to_arrays()
    assert arrays["running"].tolist() == [2, 3, 4] and arrays["budget"].dtype == np.int64
    assert History([]).to_arrays()["step"].shape == (0,)
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        history.to_dataframe()
