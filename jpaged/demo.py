"""`jpaged demo`: chat with a small model, then see continuous batching beside static batching."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write two sentences about the sea.",
    "How do I boil an egg?",
    "Explain in one sentence what a computer's memory is for.",
)
CHAT_TOKENS = 80
#: of the comparison: requests, longest prompt and longest output; about half a minute on two cores
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 24, (8, 96), (4, 96)
SLOTS = 8


def run_demo(model: str, plot: Path, *, console: Console | None = None) -> bool:
    """Streams answers to a few questions, compares the two engines, saves the picture; False if the numbers
    have a problem, which is then printed."""
    console = console or Console()
    from jpaged import LLM, SamplingParams
    from jpaged.config import EngineConfig

    config = EngineConfig(max_num_seqs=SLOTS, max_num_batched_tokens=128, max_model_len=512)
    with console.status(f"Fetching and loading {model}, compiling the step"):
        start = time.perf_counter()
        llm = LLM(model, config=config)
    console.print(f"{model} is ready after {time.perf_counter() - start:.1f} s.\n")
    with llm:
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        params = SamplingParams(temperature=0.0, max_tokens=CHAT_TOKENS)
        show_stream(console, QUESTIONS, llm.stream_chat(conversations, params))
        return compare(llm, model, plot, console)
