"""Pictures of an engine, as it is or as it was in a step of its trace."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from jpaged.runtime.engine import Engine
from jpaged.viz.pages import plot_pages


def engine_pages(engine: Engine, step: int | None = None) -> Figure:
    """`plot_pages` of an engine.

    Args:
        step: whose pages are shown, of those in `engine.trace`; the first is 1. None: the first in which most pages
            were in use, or where the engine keeps no trace, how things stand.

    Raises:
        ValueError: there is no such step, or no trace.
    """
    trace, config = engine.trace, engine.config
    if trace is None and step is not None:
        raise ValueError(f"the pages of step {step} are known where the engine keeps a trace: make it with trace=True")
    history = list(engine.history) if trace is None else trace.history
    if trace is None or not history:
        state = engine.state
        parts = state.slots.named_pages, state.prefixes.cached, state.requests.uid[state.slots.request]
        page_table, cached, uids = (np.asarray(part) for part in parts)
        labels = [f"request {engine.label(int(uid))}" for uid in uids]
        return plot_pages(history, page_table, cached, page_size=config.page_size, labels=labels, title="now")
    chosen = step if step is not None else 1 + int(np.argmax([figures.pages_in_use for figures in history]))
    labels = [f"request {trace.label(int(uid))}" for uid in trace.record(chosen).uid]
    return plot_pages(
        history, trace.page_table(chosen), trace.cached(chosen), page_size=config.page_size, step=chosen,
        labels=labels, title=f"step {chosen}" + (", when most pages were in use" if step is None else ""),
    )  # fmt: skip
