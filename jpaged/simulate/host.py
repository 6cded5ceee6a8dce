"""The host's side of a simulation: checks, programs, a progress bar."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from jpaged.config import EngineConfig
from jpaged.policy import Policy
from jpaged.record.step_records import unstacked
from jpaged.runtime.costs import CostModel
from jpaged.simulate.clock import Clock
from jpaged.simulate.result import SimulatedRun, Simulation
from jpaged.simulate.traced import Asked, Program, Run, many_steps
from jpaged.simulate.traffic import Traffic
from jpaged.step import StepRecord, make_state
from jpaged.step.scheduling.order import queue_order, running_order

#: Steps of one device call: after each the host looks which requests have ended.
STEPS = 256
#: Runs that have ended are left out where half of them have, and no sooner after they began, or were last left out.
WORTH_COMPILING_S = 60.0
#: Fields of `Counters` that are reported.
_COUNTED = ("computed_tokens", "preemptions", "prefix_queries", "prefix_hits")


def simulate(
    traffic: Traffic,
    config: EngineConfig,
    *,
    costs: CostModel,
    policies: Sequence[Policy] | Mapping[str, Policy | tuple[Policy, Policy]] | None = None,
    loads: Sequence[float] = (1.0,),
    page_sizes: Sequence[int] | None = None,
    record: bool = False,
    use_tqdm: bool = True,
) -> Simulation:
    """Runs `traffic` through an engine of these sizes, once for each policy, load and page size.

    Runs that differ in policy or load are one program under `vmap`, and take about as long as one after the other. A
    page size is a shape: each is compiled, and run after the one before. Requests with equal prompts get equal
    outputs, as with greedy decoding.

    Args:
        config: of the engine, with `num_pages` (`jpaged.runtime.sizing.size_model` says how many a memory holds),
            `max_num_seqs`, `max_num_batched_tokens` and `max_queue`. `max_model_len` None: that of the longest request,
            which is fastest. Bursts have one step, whatever it says, and every step may compute
            `max_num_batched_tokens`.
        costs: how long a step takes. It pays for the smallest of `config.budgets` that holds its tokens.
        policies: for admission; or by name, a pair where victims are chosen by another than `config.victim`. None:
            those of `config`.
        loads: how many times as fast requests come.
        page_sizes: the pool has as many bytes with each of them. None: that of `config`.
        record: keep what each step did, in `SimulatedRun.records`. For small runs: it grows with every step.
        use_tqdm: show a progress bar that counts requests that have ended, in all runs.

    Raises:
        ValueError: some request can never run with these sizes, in words; or an argument is not what it must be.
    """
    start = time.perf_counter()
    needed = ("num_pages", "max_num_seqs", "max_num_batched_tokens", "max_queue")
    if missing := [name for name in needed if getattr(config, name) is None]:
        raise ValueError(
            f"a simulation needs {', '.join(missing)}; jpaged.runtime.sizing.size_model says how many pages a memory "
            "holds"
        )
    assert config.num_pages is not None
    if config.preemption != "recompute":
        raise ValueError(
            f"a simulation knows no pool on the host: preemption must be 'recompute', got {config.preemption!r}"
        )
    longest = traffic.max_request_tokens
    if longest > (config.max_model_len or longest):
        totals = traffic.prompt_len.astype(np.int64) + traffic.output_len
        raise ValueError(
            f"request {int(np.argmax(totals))} has {longest} tokens, prompt and output; max_model_len is "
            f"{config.max_model_len}"
        )
    named = _named(policies, config)
    if not loads or not all(np.isfinite(load) and load > 0 for load in loads):
        raise ValueError(f"loads must be finite numbers above 0, at least one, got {loads!r}")
    sizes = [config.page_size] if page_sizes is None else list(page_sizes)
    pool_tokens = (1 + config.num_pages) * config.page_size
    configs = [
        replace(
            config,
            page_size=size,
            num_pages=pool_tokens // size - 1,
            trace=False,
            max_model_len=config.max_model_len or longest,
        )
        for size in sizes
    ]
    for one in configs:  # refused by the engine's own words, before anything is compiled
        empty = jax.eval_shape(partial(make_state, one, layers=1, kv_heads=1, head_dim=1))
        for admission, victim in named.values():
            state = replace(empty, admission=admission, victim=victim)
            jax.eval_shape(lambda state: (queue_order(state), running_order(state)), state)
    variants = list(product(named, loads))
    runs: list[SimulatedRun] = []
    total = len(traffic) * len(variants) * len(sizes)
    with tqdm(total=total, desc="Requests", unit="request", disable=not use_tqdm, dynamic_ncols=True) as bar:
        for one in configs:
            program = Program(one, costs, tuple(named.values()))
            runs += _simulated(program, traffic, variants, record, bar)
    return Simulation(traffic, config, costs, tuple(runs), time.perf_counter() - start)


def _named(
    policies: Sequence[Policy] | Mapping[str, Policy | tuple[Policy, Policy]] | None, config: EngineConfig
) -> dict[str, tuple[Policy, Policy]]:
    """Policies of admission and of victims by name."""
    if policies is None:
        policies = {_name(config.admission): config.admission}
    if not isinstance(policies, Mapping):
        given, policies = list(policies), {_name(policy): policy for policy in policies}
        if len(given) != len(policies):
            raise ValueError(f"two policies have the same name; name them: {{'name': policy, ...}}, got {given!r}")
    pairs = {name: of if isinstance(of, tuple) else (of, config.victim) for name, of in policies.items()}
    for name, pair in pairs.items():
        if len(pair) != 2 or not all(callable(policy) for policy in pair):
            raise ValueError(
                f"{name!r} must be a policy, as in jpaged.policy, or a pair of them; got {policies[name]!r}"
            )
    if not pairs:
        raise ValueError("policies must be None or name at least one")
    return pairs


def _name(policy: Policy) -> str:
    return getattr(policy, "__name__", repr(policy))


def _simulated(
    program: Program, traffic: Traffic, variants: list[tuple[str, float]], record: bool, bar: Any
) -> list[SimulatedRun]:
    """One program to the end of all its runs."""
    config, asked, count = program.config, Asked.of(traffic), len(traffic)
    names = list(dict.fromkeys(name for name, _ in variants))
    number = jnp.asarray([names.index(name) for name, _ in variants], jnp.int32)
    arrivals = [Clock.of(traffic.arrival_s / load) for _, load in variants]
    arrival = jax.tree.map(lambda *times: jnp.stack(times), *arrivals)
    runs = jax.jit(jax.vmap(lambda _: Run.start(config, asked)))(number)

    # The counters of the device wrap; those of a call do not.
    totals = {name: np.zeros(len(variants), np.int64) for name in _COUNTED}
    last = {name: np.zeros(len(variants), np.uint32) for name in _COUNTED}
    records: list[list[StepRecord]] = [[] for _ in variants]
    told: dict[int, SimulatedRun] = {}
    here = np.arange(len(variants))  # which variants `runs` holds
    ended = np.zeros(len(variants), np.int32)
    start = time.perf_counter()
    while len(told) < len(variants):
        runs, stacked = many_steps(program, asked, arrival, number, runs, steps=STEPS, record=record)
        before, (ended, counters) = ended, jax.device_get((runs.ended, runs.state.counters))
        bar.update(int((ended - before).sum()))
        for name in _COUNTED:
            totals[name][here] += getattr(counters, name) - last[name]
        if ((before < count) & (counters.computed_tokens == last["computed_tokens"])).any():
            raise RuntimeError(f"nothing was computed in {STEPS} steps, and {count - ended.min()} requests wait")
        last = {name: getattr(counters, name) for name in _COUNTED}
        stacked = jax.device_get(stacked)
        for place, variant in enumerate(here.tolist()):
            if variant in told:
                continue
            if stacked is not None:
                records[variant] += unstacked(jax.tree.map(lambda array, place=place: array[:, place], stacked))
            if ended[place] == count:
                told[variant] = _told(
                    jax.tree.map(lambda array, place=place: array[place], runs), variants[variant], config, traffic,
                    arrivals[variant], records[variant], {name: int(total[variant]) for name, total in totals.items()},
                )  # fmt: skip
        live = np.flatnonzero(ended < count)
        if 0 < len(live) <= len(here) // 2 and time.perf_counter() - start > WORTH_COMPILING_S:
            # Those that have ended take time for nothing. Without them it is another program.
            here, ended, last = here[live], ended[live], {name: values[live] for name, values in last.items()}
            arrival, number, runs = jax.tree.map(lambda array, live=live: array[live], (arrival, number, runs))
            start = time.perf_counter()
    return [told[variant] for variant in range(len(variants))]


def _told(
    run: Run, variant: tuple[str, float], config: EngineConfig, traffic: Traffic, arrival: Clock,
    records: list[StepRecord], totals: dict[str, int],
) -> SimulatedRun:  # fmt: skip
    """The report of a run that has ended."""
    policy, load = variant
    came, first, end = (clock.to_float() for clock in (arrival, run.first_token, run.end))
    return SimulatedRun(
        policy=policy, load=load, page_size=config.page_size, num_pages=run.state.pool.num_pages, arrival_s=came,
        ttft_s=first - came, latency_s=end - came, seconds=float(end.max() - came[0]), steps=int(run.steps),
        output_tokens=traffic.output_tokens, most_pages=int(run.most_pages), records=tuple(records[: int(run.steps)]),
        **totals,
    )  # fmt: skip
