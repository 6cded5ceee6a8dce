"""Where the time of a run goes, from XLA's own profile of the engine's real steps.

Profiling makes small operations longer, so a measured run is never profiled: its workload runs once more, and a few
bursts of each token budget are. Each operation that the profile names is looked up in the compiled program that ran.
"""

from __future__ import annotations

import re
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jpaged.bench.measure import Measurement, ServingEngine
from jpaged.bench.workload import Workload

#: What the wall time of a step is spent on; products are matrix products. `attention_kernel` is a kernel of ours, whose
#: products, softmax and reading of pages are one; none of it is counted as products. `between` is what no operation of
#: the program accounts for: dispatch and the host. It is negative where operations run side by side.
CATEGORIES = (
    "weight_products", "attention_products", "attention_kernel", "attention_other", "other_operations", "between"
)  # fmt: skip

#: Bursts of each token budget that are profiled. Each costs about a second, for the profile to be written.
_BURSTS = 3
#: Seconds of a burst that dispatch and the host may well take, however small the model is.
_HOST_S = 0.05


@dataclass(frozen=True)
class Program:
    """The operations that a compiled program runs, as a profile names them."""

    module: str
    category: dict[str, str]  # by instruction; those that contain others (loops, calls) are left out


@dataclass
class BudgetProfile:
    """Sums over the profiled bursts of one token budget."""

    bursts: int = 0
    steps: int = 0
    wall_s: float = 0.0
    category_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))


@dataclass(frozen=True)
class Breakdown:
    """Where the wall time of a run went, if each step was like the profiled ones of its token budget."""

    wall_s: float  # of the run
    steps_by_budget: dict[int, int]  # of the run
    profiles: dict[int, BudgetProfile]  # by budget

    @property
    def _weighted(self) -> list[tuple[float, BudgetProfile]]:
        """The profile of each budget, and how often what was profiled is in the run."""
        return [(steps / self.profiles[b].steps, self.profiles[b]) for b, steps in self.steps_by_budget.items()]

    @property
    def profiled_wall_s(self) -> float:
        """Wall time of all steps of the run, were each as long as the profiled ones."""
        return sum(times * profile.wall_s for times, profile in self._weighted)

    @property
    def share(self) -> dict[str, float]:
        """Of the wall time, by category; the sum is 1."""
        total = self.profiled_wall_s
        return {c: sum(times * p.category_s[c] for times, p in self._weighted) / total for c in CATEGORIES}

    @property
    def products_s(self) -> float:
        """Seconds of the run in matrix products, with weights and of attention, as profiled. They are long operations,
        which profiling hardly makes longer."""
        return self._seconds("weight_products", "attention_products")

    def _seconds(self, *categories: str) -> float:
        return sum(times * sum(p.category_s[c] for c in categories) for times, p in self._weighted)

    def to_json(self) -> dict[str, Any]:
        share = self.share
        return {
            "wall_s": self.wall_s,
            "profiled_wall_s": self.profiled_wall_s,
            "share": share,
            "category_s": {c: value * self.wall_s for c, value in share.items()},
            "outside_products_share": 1 - share["weight_products"] - share["attention_products"],
            "outside_weight_products_share": 1 - share["weight_products"],
            "products_s": self.products_s,
            "outside_products_of_run_share": 1 - self.products_s / self.wall_s,
            "attention_kernel_s": self._seconds("attention_kernel"),
            "steps_by_budget": {str(budget): steps for budget, steps in self.steps_by_budget.items()},
            "profiled_by_budget": {
                str(budget): {
                    "bursts": profile.bursts,
                    "steps": profile.steps,
                    "step_s": profile.wall_s / profile.steps,
                    "category_step_s": {c: s / profile.steps for c, s in profile.category_s.items()},
                }
                for budget, profile in self.profiles.items()
            },
        }


def check_breakdown(workload: Workload) -> None:
    """Raises ValueError where no breakdown can be made, so that no run is measured in vain."""
    if not hasattr(jax.profiler, "ProfileData"):
        raise ValueError(f"a breakdown needs jax.profiler.ProfileData, which JAX {jax.__version__} has not")
    if (backend := jax.default_backend()) != "cpu":
        raise ValueError(f"a breakdown reads XLA's profile of a CPU, and this is {backend!r}")
    if late := next((r for r in workload.requests if r.arrival_s > 0), None):
        raise ValueError(
            f"a breakdown repeats the run step by step, so all requests must arrive at 0 s; request "
            f"{late.request_id!r} of {workload.name} arrives at {late.arrival_s} s"
        )


def break_down(
    engine: ServingEngine,
    workload: Workload,
    measured: Measurement,
    *,
    progress: Callable[[int], None] | None = None,
) -> Breakdown:
    """Runs a workload again on the engine that was measured, and profiles some of its bursts.

    Up to three bursts of each token budget are profiled, evenly spread over the run; after the last one the run is
    given up, so that the engine is empty again.

    Args:
        measured: the run of `workload`, of one step at least.
        progress: gets the count of new tokens after each burst.

    Raises:
        ValueError: the steps are not those of the measured run, or the profile does not explain their time.
    """
    budgets = [sample.budget for sample in measured.history]
    wanted = _choose(budgets, engine.burst_steps)
    programs = {budget: parse_program(engine.program_text(budget)) for budget in sorted(set(budgets))}
    profiles = {budget: BudgetProfile() for budget in programs}
    unknown_s: Counter[str] = Counter()
    engine.reset_prefix_cache()
    try:
        for request in workload.requests:
            with suppress(ValueError):  # refused, as it was when measured
                engine.submit(request.to_request())
        step = 0
        while step <= max(wanted):
            budget, busy = budgets[step], engine.has_work
            if busy and step in wanted:
                events, wall_s, operations_s = _profiled_burst(engine, programs[budget].module)
            else:
                events = list(engine.burst())
            ran = engine.history[-1].budget if busy else 0
            if ran != budget:
                raise ValueError(
                    f"the run that is profiled differs from the measured one: step {step + 1} has a token budget of "
                    f"{ran}, it was {budget}"
                )
            if step in wanted:
                unknown_s += _add(profiles[budget], engine.burst_steps(budget), wall_s, operations_s, programs[budget])
            if progress is not None:
                progress(len(events))
            step += engine.burst_steps(budget)
    finally:
        engine.abort_all()
    _check_explained(list(profiles.values()), unknown_s)
    return Breakdown(measured.wall_s, dict(sorted(Counter(budgets).items())), profiles)


def _choose(budgets: Sequence[int], burst_steps: Callable[[int], int]) -> set[int]:
    """The steps with which the bursts to profile begin: of each budget those in the middle of three equal parts."""
    starts: dict[int, list[int]] = defaultdict(list)
    step = 0
    while step < len(budgets):
        starts[budgets[step]].append(step)
        step += burst_steps(budgets[step])
    chosen: set[int] = set()
    for steps in starts.values():
        count = min(_BURSTS, len(steps))
        chosen |= {steps[(2 * i + 1) * len(steps) // (2 * count)] for i in range(count)}
    return chosen


def _profiled_burst(engine: ServingEngine, module: str) -> tuple[list[Any], float, Counter[str]]:
    """What a burst returned, its wall time in seconds, and the seconds of each operation of `module` in it."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would make the host several times slower
    with tempfile.TemporaryDirectory(prefix="jpaged-profile-") as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            start = time.perf_counter()
            events = list(engine.burst())
            wall_s = time.perf_counter() - start
        operations_s: Counter[str] = Counter()
        for path in Path(directory).rglob("*.xplane.pb"):
            operations_s += read_operations(jax.profiler.ProfileData.from_file(str(path)), module)
    return events, wall_s, operations_s


def read_operations(profile: Any, module: str) -> Counter[str]:
    """Seconds by name of all events on the CPU, except those that say they are of another program than `module`."""
    found: Counter[str] = Counter()
    # JAX 0.12 makes the types of what is read here at first use, with a DeprecationWarning from Python 3.12 on; where
    # warnings are errors, as in tests, nanobind would abort the process.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        for plane in profile.planes:
            if "CPU" in plane.name:
                for line in plane.lines:
                    for event in line.events:
                        stats = dict(event.stats)
                        if stats.get("hlo_module", module) == module:
                            found[stats.get("hlo_op", event.name)] += event.duration_ns / 1e9
    return found


def _add(
    profile: BudgetProfile, steps: int, wall_s: float, operations_s: Counter[str], program: Program
) -> Counter[str]:
    """Adds a burst to `profile`; returns what it spent on names that are no operations of `program`."""
    profile.bursts += 1
    profile.steps += steps
    profile.wall_s += wall_s
    profile.category_s["between"] += wall_s
    unknown_s: Counter[str] = Counter()
    for name, seconds in operations_s.items():
        if category := program.category.get(name):
            profile.category_s[category] += seconds
            profile.category_s["between"] -= seconds
        else:
            unknown_s[name] = seconds
    return unknown_s


def _check_explained(profiles: Sequence[BudgetProfile], unknown_s: Counter[str]) -> None:
    """Raises ValueError if less than half of the wall time went to known operations, and more than the host takes."""
    wall_s = sum(p.wall_s for p in profiles)
    between_s = sum(p.category_s["between"] for p in profiles)
    bursts = sum(p.bursts for p in profiles)
    if between_s > max(wall_s / 2, _HOST_S * bursts) or between_s >= wall_s:
        found = ", ".join(f"{name} ({1000 * s:.1f} ms)" for name, s in unknown_s.most_common(5)) or "nothing"
        raise ValueError(
            f"the profile of {bursts} bursts explains {1000 * (wall_s - between_s):.1f} of {1000 * wall_s:.1f} ms. "
            f"Beside the programs' operations it names {found}. JAX {jax.__version__} may name operations in a new way"
        )


class _Instruction(NamedTuple):
    name: str
    opcode: str
    op_name: str  # what it was in Python; empty where XLA made it up
    called: list[str]  # computations


_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = .*? ([\w\-]+)\(")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def parse_program(text: str) -> Program:
    """The operations of a compiled program and their categories, from its HLO text.

    A product is a `dot`, or a fusion with one in it; a kernel is a custom call. What belongs to attention says so in
    its `op_name`; what has none does if all loops that it stands in are attention's.

    Raises:
        ValueError: the text is no HLO module.
    """
    module, entry = re.match(r"HloModule ([\w.\-]+)", text), ""
    computations: dict[str, list[_Instruction]] = {}
    instructions: list[_Instruction] = []
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            computations[head[2]] = instructions = []
            entry = head[2] if head[1] else entry
        elif found := _INSTRUCTION.match(line):
            op_name, branches = _OP_NAME.search(line), _BRANCHES.search(line)
            called = _CALLED.findall(line) + re.findall(r"[\w.\-]+", branches[1] if branches else "")
            # XLA makes one kernel of a small call, so that nothing in it is ever profiled.
            opcode = "kernel" if "xla_cpu_small_call" in line else found[2]
            instructions.append(_Instruction(found[1], opcode, op_name[1] if op_name else "", called))
    if module is None or not entry:
        raise ValueError(f"this is no HLO module: {text[:80]!r}")

    # A computation is printed before those that call it.
    with_dot: set[str] = set()
    for computation, instructions in computations.items():
        if any(i.opcode == "dot" or with_dot.intersection(i.called) for i in instructions):
            with_dot.add(computation)
    category: dict[str, str] = {}
    in_attention = {entry: False}  # only computations that run as they stand: no fusion's, no reduction's
    for computation in reversed(computations):
        if computation not in in_attention:
            continue
        for i in computations[computation]:
            attention = "paged_attention" in i.op_name or (not i.op_name and in_attention[computation])
            if i.opcode in ("while", "call", "conditional"):
                in_attention |= {c: attention and in_attention.get(c, True) for c in i.called}
            elif i.opcode == "custom-call" and attention:
                category[i.name] = "attention_kernel"
            elif i.opcode == "dot" or with_dot.intersection(i.called):
                category[i.name] = "attention_products" if attention else "weight_products"
            else:
                category[i.name] = "attention_other" if attention else "other_operations"
    return Program(module[1], category)
