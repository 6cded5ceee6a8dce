"""What scheduling costs: the step with a decoder that computes nothing, over slots, queued requests and pages.

    python -m jpaged.bench.scheduling
    python -m jpaged.bench.scheduling --slots 256 --queued 4096 --pages 30000 --json scheduling.json
    python -m jpaged.bench.scheduling --slots 64 --queued 64 --pages 30000 --max-model-len 4096 131072

Every slot decodes, the queue is full, and no request ends: all work there is, and none for a model. Beside the times
stands what the compiler made of the programs. A row is measured and let go before the next; the table comes last, and
after it the results as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from jpaged.bench.hlo import report
from jpaged.bench.report import usable_cores
from jpaged.config import EngineConfig
from jpaged.models.nothing import NoModel
from jpaged.step import EngineState, Submission, demand, make_state, step, submit

PAGE_SIZE = 16
#: Prompt tokens of a request where there are pages enough; less where there are not.
MOST_PROMPT_TOKENS = 512
#: Steps before those that are timed: the first calls of a program touch memory that later ones find touched.
_SETTLING = 4
#: Requests that one call puts into the queue.
_AT_ONCE = 64
_QUICKLY = {"cpu": {"xla_backend_optimization_level": 0}}


@dataclass(frozen=True)
class Sizes:
    """A row of the table. Pages are of `PAGE_SIZE` tokens.

    Raises:
        ValueError: the pool does not hold one request of `max_model_len`.
    """

    slots: int
    queued: int
    pages: int
    max_model_len: int = 4096

    def __post_init__(self):
        jax.eval_shape(self.state)

    def state(self, *, swap_space_bytes: int | None = None) -> EngineState:
        """An empty engine of these sizes, with as little in its pages as can be; with a pool on the host, if that has a
        size."""
        config = EngineConfig(
            page_size=PAGE_SIZE, num_pages=self.pages, max_num_seqs=self.slots, max_queue=self.queued,
            max_num_batched_tokens=self.slots, max_model_len=self.max_model_len, swap_space_bytes=swap_space_bytes,
            preemption="recompute" if swap_space_bytes is None else "swap",
        )  # fmt: skip
        return make_state(config, layers=1, kv_heads=1, head_dim=1)

    def step(self, state: EngineState) -> EngineState:
        """The step that decodes a token for every slot."""
        return step(NoModel(), None, state, budget=self.slots)

    def prompt_tokens(self, steps: int) -> int:
        """Length of the prompts with which all slots can run and decode in `steps` timed steps.

        Raises:
            ValueError: there are too few pages for that, or requests may not be so long.
        """
        room = min(self.pages // self.slots * PAGE_SIZE, self.max_model_len)  # tokens of a request
        # A page ahead of each request is spoken for at admission.
        least = PAGE_SIZE + _SETTLING + steps + 2
        if room < least:
            raise ValueError(
                f"{self.slots} slots that decode for {steps} steps need {-(-least // PAGE_SIZE) * self.slots} pages of "
                f"{PAGE_SIZE} tokens and a max_model_len of {least}, got {self.pages} and {self.max_model_len}; give "
                "more of these, fewer slots or fewer steps"
            )
        # The first decode while the last are prefilled, a page of each a step.
        return min((room - least + 2) * 15 // 16, MOST_PROMPT_TOKENS)


def full_of_work(sizes: Sizes, prompt_tokens: int) -> EngineState:
    """A state in which every slot decodes and the queue is full, of requests with random prompts."""
    # What is not timed need not be fast: compiling it without LLVM's optimizations takes less.
    quick = partial(jax.jit, donate_argnums=0, compiler_options=_QUICKLY.get(jax.default_backend()))
    state, rng = sizes.state(), np.random.default_rng(0)
    put = quick(lambda state, batch: submit(state, batch))  # a function of its own, for its cache to go with it
    requests = sizes.slots + sizes.queued
    for first in range(0, requests, _AT_ONCE):
        count = min(_AT_ONCE, requests - first)
        batch = Submission.empty(_AT_ONCE, sizes.max_model_len)
        batch.valid[:count] = True
        batch.uid[:] = first + np.arange(_AT_ONCE)
        batch.tokens[:, :prompt_tokens] = rng.integers(0, NoModel.vocab, (_AT_ONCE, prompt_tokens))
        batch.num_tokens[:] = batch.num_prompt_tokens[:] = prompt_tokens
        batch.sampling.max_len[:] = sizes.max_model_len
        state = put(state, batch)
    # A page for every slot in each step, on the whole.
    prefill = quick(partial(step, NoModel(), None, budget=PAGE_SIZE * sizes.slots))
    for _ in range(2 + 2 * prompt_tokens // PAGE_SIZE):
        state = prefill(state)
        if bool(jnp.all(state.record.sampled)):
            return state
    raise RuntimeError(f"{sizes}: {int(state.record.running)} requests run, and not all decode")


def measure(sizes: Sizes, *, steps: int) -> dict[str, Any]:
    """One row: the milliseconds of a step and of `demand` after it, median and fastest of `steps`, each waited for;
    and of both programs what the compiler made of them, see `report`.

    Raises:
        ValueError: see `Sizes.prompt_tokens`.
        RuntimeError: a timed step was not one in which every slot decodes and the queue is full.
    """
    prompt_tokens = sizes.prompt_tokens(steps)
    shape = jax.eval_shape(sizes.state)
    start = time.perf_counter()
    one = jax.jit(sizes.step, donate_argnums=0).lower(shape).compile()
    compile_s = time.perf_counter() - start
    asks = jax.jit(lambda state: demand(state)).lower(shape).compile()
    state = full_of_work(sizes, prompt_tokens)

    step_ms: list[float] = []
    demand_ms: list[float] = []
    for _ in range(_SETTLING + steps):
        state, taken = _timed(one, state)
        step_ms.append(taken)
        wanted, taken = _timed(asks, state)
        demand_ms.append(taken)
        record = state.record
        seen = {"sampled": record.sampled.sum(), "waiting": record.waiting, "wanted": wanted}
        seen = {name: int(count) for name, count in seen.items()}
        if seen != {"sampled": sizes.slots, "waiting": sizes.queued, "wanted": sizes.slots}:
            raise RuntimeError(f"{sizes}: not all slots decode, or the queue is not full: {seen}")
    return asdict(sizes) | {
        "prompt_tokens": prompt_tokens,
        "pages_in_use": int(record.pages_in_use),
        "steps": steps,
        "step_ms": statistics.median(step_ms[_SETTLING:]),
        "step_least_ms": min(step_ms[_SETTLING:]),
        "demand_ms": statistics.median(demand_ms[_SETTLING:]),
        "demand_least_ms": min(demand_ms[_SETTLING:]),
        "compile_s": compile_s,
        "step": report(one, state.pool.k.shape),
        "demand": report(asks, state.pool.k.shape),
    }


def _timed(function: Callable[[EngineState], Any], state: EngineState) -> tuple[Any, float]:
    """What it returns, and the milliseconds until that is there."""
    start = time.perf_counter()
    result = jax.block_until_ready(function(state))
    return result, 1e3 * (time.perf_counter() - start)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows, all of one `max_model_len`, and what they are of."""
    table = Table(
        title=f"Scheduling alone, ms: {jax.devices()[0].device_kind}, {usable_cores()} cores, JAX {jax.__version__}, "
        f"requests of up to {rows[0]['max_model_len']:,} tokens",
        title_justify="left",
        caption="Every slot decodes and the queue is full. Of a step and of `demand` after it: median and fastest, and "
        "what is compiled: conditionals, loops, those of them whose length is found while they run (open), copies of "
        "the pool, and KiB of the step's temporaries.",
        caption_justify="left",
        box=SIMPLE,
        padding=0,
    )
    times = ("step", "fastest", "demand", "fastest")
    for head in ("slots", "queued", "pages", *times, "cond.", "loops", "open", "copies", "KiB"):
        table.add_column(head, justify="right")
    for row in rows:
        shown = [f"{row[key]:.2f}" for key in ("step_ms", "step_least_ms", "demand_ms", "demand_least_ms")]
        programs = row["step"], row["demand"]
        counts = (
            [p["conditionals"] for p in programs],
            [len(p["known_loops"]) for p in programs],
            [len(p["unknown_loops"]) for p in programs],
            [p["pool_copies"] for p in programs],
        )
        temporary = f"{-(-row['step']['temporary_bytes'] // 1024):,}"
        sizes = [f"{row[key]:,}" for key in ("slots", "queued", "pages")]
        table.add_row(*sizes, *shown, *("/".join(f"{n:,}" for n in pair) for pair in counts), temporary)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, given, text in (
        ("slots", [16, 64, 256], "requests that run"),
        ("queued", [64, 1024, 4096], "requests that wait on the device"),
        ("pages", [1000, 30_000], f"of {PAGE_SIZE} tokens"),
    ):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=given, help=text)
    parser.add_argument("--max-model-len", type=int, nargs="+", default=[4096], help="most tokens of a request")
    parser.add_argument("--steps", type=int, default=20, help="that are timed")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args(arguments)
    try:
        if options.steps < 1:
            raise ValueError(f"steps must be at least 1, got {options.steps}")
        grid = product(options.slots, options.queued, options.pages, options.max_model_len)
        cases = [Sizes(*sizes) for sizes in grid]
        for sizes in cases:  # what cannot be measured is said before anything is
            sizes.prompt_tokens(options.steps)
    except ValueError as error:
        parser.error(str(error))
    rows: list[dict[str, Any]] = []
    for number, sizes in enumerate(cases, start=1):
        rows.append(measure(sizes, steps=options.steps))
        print(f"{number} of {len(cases)}: {sizes}, {rows[-1]['step_ms']:.2f} ms", file=sys.stderr, flush=True)
    console = Console()
    for longest in options.max_model_len:
        console.print(table([row for row in rows if row["max_model_len"] == longest]))
    for row in rows[1:]:
        if [row[key] for key in ("slots", "queued", "pages")] == [rows[0][key] for key in ("slots", "queued", "pages")]:
            ratio = row["step_least_ms"] / rows[0]["step_least_ms"]
            of = f"max_model_len {row['max_model_len']:,} to {rows[0]['max_model_len']:,}"
            console.print(f"fastest step, {of}: {ratio:.2f} times")
    found = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "threads": usable_cores(), "rows": rows}
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
