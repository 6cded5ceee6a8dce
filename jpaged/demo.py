"""`jpaged demo`: chat with a small model, then see continuous batching beside static batching."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from jpaged.bench.compare import make_report
from jpaged.bench.workload import synthetic_workload

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write two sentences about the sea.",
    "Name three animals that live in a forest.",
    "Explain in one sentence what a computer's memory is for.",
)
CHAT_TOKENS = 64
#: of the comparison: requests, lengths of prompts and of outputs; about twenty seconds on two cores
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 20, (8, 64), (4, 80)
SLOTS, LONGEST = 8, 256


def run_demo(model: str, plot: Path, *, console: Console | None = None) -> bool:
    """Streams answers to a few questions, compares the two engines, and saves the picture at `plot`.

    Returns False if the comparison has a problem, which is printed.
    """
    console = console or Console()
    from jpaged.config import EngineConfig
    from jpaged.llm import LLM
    from jpaged.request import SamplingParams

    config = EngineConfig(
        max_num_seqs=SLOTS,
        max_num_batched_tokens=64,
        token_budgets=(SLOTS, 64),  # two programs: compiling takes longer than all that follows
        max_model_len=LONGEST,
        num_pages=SLOTS * LONGEST // 16,
    )
    start = time.perf_counter()
    with console.status(f"fetching and loading {model}, compiling the step"):
        llm = LLM(model, config=config)
        llm.warmup()
    with llm:
        console.print(f"{model} is ready after {time.perf_counter() - start:.1f} s. Four chats, one running batch:\n")
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        params = SamplingParams(temperature=0.0, max_tokens=CHAT_TOKENS)
        show_stream(console, QUESTIONS, llm.stream_chat(conversations, params))
        return compare(llm, model, plot, console)


def show_stream(console: Console, questions: Sequence[str], events: Iterable[Any]) -> None:
    """The answers as they grow, one panel each; where the output is no terminal, each when it is finished.

    Args:
        events: have `index` (of the question), `delta_text` and `finished`.
    """
    answers = ["" for _ in questions]

    def panel(i: int) -> Panel:
        return Panel(Text(answers[i]), title=Text(questions[i]), title_align="left")

    if not console.is_terminal:
        for event in events:
            answers[event.index] += event.delta_text
            if event.finished:
                console.print(panel(event.index))
        return
    with Live(console=console, refresh_per_second=12) as live:
        for event in events:
            answers[event.index] += event.delta_text
            live.update(Group(*(panel(i) for i in range(len(questions)))))


def compare(llm: Any, model: str, plot: Path, console: Console) -> bool:
    """Both engines on one seeded mix, on the weights that `llm` holds; prints the table, saves the plot."""
    from jpaged.bench.run import run_engine
    from jpaged.viz.pages import plot_occupancy

    vocab = llm.model_config.vocab_size
    workload = synthetic_workload(
        REQUESTS, seed=0, token_ids=(0, vocab - 1), prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS
    )
    console.print(f"\nThe same {REQUESTS} requests through both engines, {SLOTS} at a time:\n")
    bars = Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    with bars:
        outcomes = [
            run_engine(kind, llm, workload, llm.config, model=model, **_shown_in(bars, kind))
            for kind in ("continuous", "static")
        ]
    report = make_report(outcomes, check=True)
    report.print(console)
    histories = {outcome.result.engine: outcome.measured.history for outcome in outcomes}
    sizes = {outcome.result.engine: outcome.measured.page_size for outcome in outcomes}
    plot_occupancy(histories, page_size=sizes, title=f"{model}: {workload.name}").savefig(plot)
    console.print(f"\nToken ids are identical: {'no' if report.difference else 'yes'}. Page occupancy: {plot}")
    return not report.problems


@dataclass(frozen=True)
class _Bar:
    bars: Progress
    task: TaskID

    def update(self, tokens: int) -> None:
        self.bars.advance(self.task, tokens)


def _shown_in(bars: Progress, kind: str) -> dict[str, Any]:
    """The callbacks of `run_engine` that show one engine as one bar, which first says that it compiles."""
    task = bars.add_task(f"{kind}: compiling", total=None, start=False)

    @contextmanager
    def bar(name: str, total: int) -> Iterator[_Bar]:
        bars.start_task(task)  # the time beside the bar is that of the table: compiling is not in it
        bars.update(task, description=f"{name}: output tokens", total=total)
        yield _Bar(bars, task)

    return {"bar": bar}
