"""A trace: all inputs of an engine, in order, and what each of its steps decided.

The engine is a value and the step a pure function, so the inputs determine everything: the same inputs give the same
states, to the bit (`jpaged.record.replay`). The records say what happened without running anything: which request got
how many tokens and which pages, which pages were found, which requests were preempted, which tokens were sampled. Page
tables follow from the records.

    restart, submit 3 requests, burst of 1 step, burst of 1 step, abort 1, burst of 1 step, ...     inputs
                                record 1         record 2                  record 3                 records
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import jax
import numpy as np

from jpaged.config import EngineConfig
from jpaged.policy import Policy, named
from jpaged.pool import SCRATCH_PAGE
from jpaged.record import trace_file
from jpaged.record.inputs import Burst, Input, Submit
from jpaged.record.stats import StepStats
from jpaged.record.step_records import difference, leaves, record_difference, unstacked
from jpaged.step import NO_REQUEST, Finish, StepRecord
from jpaged.step.decisions import Decisions


@dataclass(frozen=True)
class TracedRequest:
    """What pictures say of a request. Its arrays are in the inputs."""

    request_id: str
    prompt_tokens: int
    after: int  # steps that were done when it was submitted to the engine


@dataclass
class Trace:
    """All inputs of an engine and what it did. A trace grows with every step; `nbytes` says how large it is.

    Args:
        config: of the engine, with every field resolved.
        shape: `layers`, `kv_heads` and `head_dim` of its pool.
        made_by: versions and platform, to find the cause of a difference.
    """

    config: EngineConfig
    shape: dict[str, int]
    made_by: dict[str, str] = field(default_factory=lambda: made_by())
    requests: dict[int, TracedRequest] = field(default_factory=dict)  # by uid
    inputs: list[Input] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)  # of numpy arrays

    def __post_init__(self):
        if not self.config.trace:
            raise ValueError("a trace needs an engine that records its decisions: EngineConfig(trace=True)")

    # -- while the engine runs

    def begin_burst(self, budget: int, steps: int) -> Burst:
        """Notes a burst that was started; `end_burst` follows when its records are read."""
        burst = Burst(budget, steps)
        self.inputs.append(burst)
        return burst

    def end_burst(self, records: StepRecord) -> None:
        """Takes the records of the oldest burst whose records are missing, stacked `[steps, ...]`, as numpy arrays."""
        self.records += unstacked(records)

    def forget_bursts(self, bursts: Sequence[Burst]) -> None:
        """Forgets bursts whose records will never be read, because the state was lost. A `Restart` follows."""
        self.inputs = [told for told in self.inputs if not any(told is burst for burst in bursts)]

    # -- a look inside

    def __len__(self) -> int:
        """Steps."""
        return len(self.records)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        kept = (self.records, [given.batch for given in self.inputs if isinstance(given, Submit)])
        return sum(leaf.nbytes for leaf in jax.tree.leaves(kept))

    def __repr__(self) -> str:
        return f"Trace({len(self.requests)} requests, {len(self)} steps, {self.nbytes:,} bytes)"

    def record(self, step: int) -> StepRecord:
        """What step `step` did; the first is 1. Arrays are numpy's.

        Raises:
            ValueError: there is no such step.
        """
        self.check_step(step)
        return self.records[step - 1]

    def check_step(self, step: int) -> None:
        """Raises ValueError, in words, unless `step` is one of the trace."""
        if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or not 1 <= step <= len(self):
            steps = f"steps 1 to {len(self)}" if self.records else "no steps yet"
            raise ValueError(f"this trace has {steps}; got step {step!r}")

    def label(self, uid: int) -> str:
        """The request's id, as the caller gave it."""
        return self.requests[uid].request_id if uid in self.requests else f"uid {uid}"

    def page_table(self, step: int) -> np.ndarray:
        """The pages `[S, M]` int32 of each slot as step `step` left them, SCRATCH_PAGE where there is none. A
        request that ended in that step (`record(step).finish`) still has its slot."""
        self.check_step(step)
        return next(islice(self.page_tables(), step - 1, None))

    def page_tables(self) -> Iterator[np.ndarray]:
        """`page_table` of every step, in order."""
        table = np.full((self.config.max_num_seqs, self.config.max_pages_per_seq), SCRATCH_PAGE, np.int32)
        column = np.arange(table.shape[1])
        for record in self.records:
            decisions = _decisions(record)
            restored = decisions.restored
            table[restored.slot, restored.column] = restored.page
            table[column >= decisions.kept[:, None]] = SCRATCH_PAGE
            for part in (decisions.found, decisions.taken, decisions.shared):
                table[part.slot, part.column] = part.page
            yield table.copy()

    def cached(self, step: int) -> np.ndarray:
        """Whether others can find what each page `[P]` bool holds after step `step`. Pages that no table names and that
        are cached are shown."""
        assert self.config.num_pages is not None
        packed = np.asarray(_decisions(self.record(step)).cached)
        return np.unpackbits(packed, count=1 + self.config.num_pages).astype(bool)

    @property
    def budgets(self) -> list[int]:
        """The most tokens that each step could compute."""
        return [given.budget for given in self.inputs if isinstance(given, Burst) for _ in range(given.steps)]

    @property
    def history(self) -> list[StepStats]:
        """The figures of every step. `waiting` counts the queue on the device only."""
        each = enumerate(zip(self.records, self.budgets, strict=True), 1)
        return [StepStats.of(record, step, budget) for step, (record, budget) in each]

    def describe(self, step: int) -> str:
        """What step `step` decided, in words: a line for each slot that is not empty."""
        record = self.record(step)
        decisions, figures = _decisions(record), StepStats.of(record, step, self.budgets[step - 1])
        free = int(self.config.num_pages or 0) - figures.pages_in_use - figures.pages_cached
        lines = [
            f"step {step}: {figures.scheduled_tokens} of {figures.budget} tokens; {figures.running} running, "
            f"{figures.waiting} waiting; pages: {figures.pages_in_use} in use, {figures.pages_cached} cached, "
            f"{free} free"
        ]
        for slot in np.flatnonzero(record.left != NO_REQUEST):
            goes = "is swapped out" if record.to_host[slot] else "is preempted"
            lines.append(f"  slot {slot}: request {self.label(int(record.left[slot]))} {goes}")
        for slot in np.flatnonzero(decisions.preempted != NO_REQUEST):
            lines.append(f"  slot {slot}: request {self.label(int(decisions.preempted[slot]))} is preempted")
        before = self.records[step - 2] if step > 1 else None
        for slot in np.flatnonzero(record.uid != NO_REQUEST):
            uid = int(record.uid[slot])
            stays = before is not None and bool(before.uid[slot] == uid)
            stays = stays and uid not in (int(decisions.preempted[slot]), int(record.left[slot]))
            words = [] if stays else ["is admitted"]
            for verb, part in (
                ("brings back", decisions.restored), ("finds", decisions.found), ("takes", decisions.taken),
                ("shares", decisions.shared),
            ):  # fmt: skip
                if len(pages := part.page[part.slot == slot]):
                    words.append(f"{verb} page{'s' * (len(pages) > 1)} {', '.join(map(str, pages))}")
            tokens = int(record.scheduled[slot])
            words.append(f"computes {tokens} token{'s' * (tokens != 1)}" if tokens else "waits")
            if record.sampled[slot]:
                words.append(f"samples {int(record.token[slot])}")
            if record.finish[slot] != Finish.NOT:
                words.append(f"ends ({Finish(int(record.finish[slot])).name.lower()})")
            lines.append(f"  slot {slot}: request {self.label(uid)} {', '.join(words)}")
        return "\n".join(lines)

    # -- two of them

    def difference(self, other: Trace) -> str | None:
        """The first thing in which `other` is not the same to the bit, in words; None: nothing. What made them
        (`made_by`) may differ."""
        for name in ("config", "shape", "requests"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine!r} and {theirs!r}"
        for number, (mine, theirs) in enumerate(zip(self.inputs, other.inputs, strict=False), 1):
            if type(mine) is not type(theirs):
                return f"input {number}: {type(mine).__name__} and {type(theirs).__name__}"
            if isinstance(mine, Submit) and isinstance(theirs, Submit):
                if words := difference(dict(leaves(mine.batch)), dict(leaves(theirs.batch))):
                    return f"input {number}: {words}"
            elif mine != theirs:
                return f"input {number}: {mine} and {theirs}"
        for step, (one, another) in enumerate(zip(self.records, other.records, strict=False), 1):
            if words := record_difference(one, another):
                return f"step {step}: {words}"
        for name in ("inputs", "records"):
            counts = len(getattr(self, name)), len(getattr(other, name))
            if counts[0] != counts[1]:
                return f"{counts[0]} and {counts[1]} {name}"
        return None

    # -- files

    def save(self, path: str | Path) -> None:
        """Writes the trace to a file of numpy's (`.npz`, without pickle). Policies are written by their names."""
        head = {
            "config": self.config.to_json(), "shape": self.shape, "made_by": self.made_by,
            "requests": [[uid, *asdict(request).values()] for uid, request in self.requests.items()],
        }  # fmt: skip
        trace_file.write(Path(path), head, self.inputs, self.records)

    @classmethod
    def load(cls, path: str | Path, *, admission: Policy | None = None, victim: Policy | None = None) -> Trace:
        """Reads what `save` wrote.

        Args:
            admission, victim: the policies, where they are not of `jpaged.policy`.

        Raises:
            ValueError: for a file that is not a trace, one of another format, one that lacks something, or one whose
                policies are not known.
        """
        head, inputs, records = trace_file.read(Path(path))
        config = head["config"]
        for name, given in (("admission", admission), ("victim", victim)):
            try:
                config[name] = given or named(config[name])
            except ValueError as error:
                raise ValueError(f"{path}: {error}; give it, load(path, {name}=...)") from error
        try:
            requests = {uid: TracedRequest(*values) for uid, *values in head["requests"]}
            return cls(EngineConfig(**config), head["shape"], head["made_by"], requests, inputs, records)
        except TypeError as error:
            raise ValueError(f"{path} was written by another version of jpaged: {error}") from error


def made_by() -> dict[str, str]:
    """The version of JAX and the platform of this process."""
    return {"jax": jax.__version__, "platform": jax.default_backend()}


def _decisions(record: StepRecord) -> Decisions:
    assert record.decisions is not None  # a trace has no other records
    return record.decisions
