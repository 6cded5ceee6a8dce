"""A trace: all that an engine was told, in order, and what each of its steps decided.

The engine is a value and the step a pure function, so what it was told is all that there is to know: told the same
again, it does the same, to the bit (`jpaged.record.replay`). The records say what that was without running
anything: who got how many tokens and which pages, what was found, who was preempted, what was sampled. Page tables
follow from them.

    restart, submit 3 requests, burst of 1 step, burst of 1 step, abort 1, burst of 1 step, ...     inputs
                                record 1         record 2                  record 3                 records
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpaged.config import EngineConfig
from jpaged.policy import Policy, named
from jpaged.pool import SCRATCH_PAGE
from jpaged.record.stats import StepStats
from jpaged.step import Finish, StepRecord, Submission
from jpaged.step.decisions import Decisions, Placed

#: Of the files that `Trace.save` writes; another number is another layout.
FORMAT = 3


@dataclass(frozen=True)
class Submit:
    """Requests put into the queue on the device: the valid rows of a `Submission`, tokens up to the longest."""

    batch: Submission

    @classmethod
    def of(cls, batch: Submission) -> Submit:
        valid = np.flatnonzero(batch.valid)
        rows = {f.name: getattr(batch, f.name)[valid] for f in fields(batch)}
        longest = int(rows["num_tokens"].max(initial=0))
        return cls(Submission(**rows | {"tokens": rows["tokens"][:, :longest]}))

    def padded(self, size: int, max_model_len: int) -> Submission:
        """The rows in a batch of `size`, as the state takes it."""
        batch = Submission.empty(size, max_model_len)
        for f in fields(batch):
            rows = getattr(self.batch, f.name)
            into = getattr(batch, f.name)[: len(rows)]
            (into[:, : rows.shape[1]] if f.name == "tokens" else into)[...] = rows
        return batch


@dataclass(frozen=True)
class Fork:
    """A request that was branched."""

    uid: int
    new_uid: int
    seed: int


@dataclass(frozen=True)
class Abort:
    """Requests that were given up, which leave at once, and prompts as long as max_model_len, which end on the host."""

    uids: tuple[int, ...]


@dataclass(frozen=True)
class Burst:
    """`steps` steps of at most `budget` tokens, and an eviction."""

    budget: int
    steps: int


@dataclass(frozen=True)
class ResetPrefixCache:
    """Nothing of what pages hold is found any more."""


@dataclass(frozen=True)
class ReplaceParams:
    """Other weights from here on."""


@dataclass(frozen=True)
class Restart:
    """An empty state: in the beginning, and where one was lost in a call that failed or was interrupted."""


Input = Submit | Fork | Abort | Burst | ResetPrefixCache | ReplaceParams | Restart
_INPUTS: dict[str, type] = {
    kind.__name__: kind for kind in (Submit, Fork, Abort, Burst, ResetPrefixCache, ReplaceParams, Restart)
}


@dataclass(frozen=True)
class TracedRequest:
    """What pictures say of a request. Its arrays are in the inputs."""

    request_id: str
    prompt_tokens: int
    after: int  # steps that were done when it was submitted to the engine


@dataclass
class Trace:
    """What an engine was told and what it did. It is whole, so it grows; `nbytes` says how large it is.

    Args:
        config: of the engine, nothing left open.
        shape: `layers`, `kv_heads` and `head_dim` of its pool.
        made_by: versions and platform, for people who look for a difference.
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

    def add_burst(self, budget: int, records: StepRecord) -> None:
        """A burst that was run, and the records of its steps, stacked `[steps, ...]`, as numpy arrays."""
        self.inputs.append(Burst(budget, records.uid.shape[0]))
        self.records += unstacked(records)

    # -- a look inside

    def __len__(self) -> int:
        """Steps."""
        return len(self.records)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        kept = (self.records, [vars(told.batch) for told in self.inputs if isinstance(told, Submit)])
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
        """The pages `[S, M]` int32 of each slot as step `step` left them, SCRATCH_PAGE where there is none. Whoever
        ended in that step (`record(step).finish`) still has a slot."""
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
        return [told.budget for told in self.inputs if isinstance(told, Burst) for _ in range(told.steps)]

    @property
    def history(self) -> list[StepStats]:
        """The figures of every step. Those who wait are those in the queue on the device."""
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
        for slot in np.flatnonzero(record.left):
            goes = "is swapped out" if record.to_host[slot] else "is preempted"
            lines.append(f"  slot {slot}: request {self.label(int(record.left[slot]))} {goes}")
        for slot in np.flatnonzero(decisions.preempted):
            lines.append(f"  slot {slot}: request {self.label(int(decisions.preempted[slot]))} is preempted")
        before = self.records[step - 2] if step > 1 else None
        for slot in np.flatnonzero(record.uid):
            uid = int(record.uid[slot])
            stays = before is not None and bool(before.uid[slot] == uid)
            stays = stays and uid not in (int(decisions.preempted[slot]), int(record.left[slot]))
            words = [] if stays else ["comes in"]
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
                if words := _difference(vars(mine.batch), vars(theirs.batch)):
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
        """Writes it to a file of numpy's (`.npz`, without pickle). Policies are written by their names."""
        batches = [told.batch for told in self.inputs if isinstance(told, Submit)]
        about = {
            "format": FORMAT, "config": self.config.to_json(), "shape": self.shape, "made_by": self.made_by,
            "requests": [[uid, *asdict(request).values()] for uid, request in self.requests.items()],
            "inputs": [
                [type(told).__name__, *([len(told.batch.uid)] if isinstance(told, Submit) else vars(told).values())]
                for told in self.inputs
            ],
        }  # fmt: skip
        columns: dict[str, list[np.ndarray]] = {}
        longest = max((batch.tokens.shape[1] for batch in batches), default=0)
        for batch in batches:
            for name, rows in vars(batch).items():
                short = longest - rows.shape[1] if name == "tokens" else 0
                columns.setdefault(f"submission.{name}", []).append(
                    np.pad(rows, ((0, 0), (0, short))) if short else rows
                )
        for record in self.records:
            for name, value in _leaves(record):
                # The lists of a step are as long as their count says; all else has one shape.
                columns.setdefault(f"record.{name}", []).append(value if name.endswith(_LISTS) else value[None])
        arrays = {name: np.concatenate(parts) for name, parts in columns.items()}
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)  # type: ignore[arg-type]
        partial.replace(path)

    @classmethod
    def load(cls, path: str | Path, *, admission: Policy | None = None, victim: Policy | None = None) -> Trace:
        """Reads what `save` wrote.

        Args:
            admission, victim: the policies, where they are not of `jpaged.policy`.

        Raises:
            ValueError: for a file that is not a trace, one of another format, one that lacks something, or one whose
                policies are not known.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
            about = json.loads(str(arrays.pop("about")))
        except (KeyError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is not a trace that Trace.save wrote: {error}") from error
        if about["format"] != FORMAT:
            raise ValueError(f"{path} has format {about['format']}; this version of jpaged reads {FORMAT}")
        config = about["config"]
        for name, given in (("admission", admission), ("victim", victim)):
            try:
                config[name] = given or named(config[name])
            except ValueError as error:
                raise ValueError(f"{path}: {error}; give it, load(path, {name}=...)") from error
        try:
            trace = cls(EngineConfig(**config), about["shape"], about["made_by"])
            trace.requests = {uid: TracedRequest(*values) for uid, *values in about["requests"]}
            trace._fill(about["inputs"], arrays)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} was written by another version of jpaged: {error}") from error
        return trace

    def _fill(self, inputs: list, arrays: dict[str, np.ndarray]) -> None:
        row = steps = 0
        for kind, *values in inputs:
            if kind == "Submit":
                rows = slice(row, row := row + values[0])
                batch = Submission(**{f.name: arrays[f"submission.{f.name}"][rows] for f in fields(Submission)})
                self.inputs.append(Submit.of(batch))
            elif kind == "Abort":
                self.inputs.append(Abort(tuple(values[0])))
            else:
                self.inputs.append(_INPUTS[kind](*values))
                steps += values[1] if kind == "Burst" else 0
        # Any record of the right structure will do: its leaves are replaced.
        empty = Placed.empty(0)
        like = StepRecord.zeros(0, Decisions(empty.page, empty.page, empty, empty, empty, empty, empty.page))
        names, structure = [name for name, _ in _leaves(like)], jax.tree.structure(like)
        ends = {name: np.cumsum(arrays[f"record.{name}"]) for name in names if name.endswith(".count")} if steps else {}
        for step in range(steps):
            leaves = []
            for name in names:
                at: Any = step
                if name.endswith(_LISTS):
                    end = ends[f"{name.rpartition('.')[0]}.count"]
                    at = slice(end[step - 1] if step else 0, end[step])
                leaves.append(np.asarray(arrays[f"record.{name}"][at]))
            self.records.append(jax.tree.unflatten(structure, leaves))


def made_by() -> dict[str, str]:
    """What runs here."""
    return {"jax": jax.__version__, "platform": jax.default_backend()}


#: Leaves of `Placed` that are as long as its count says.
_LISTS = (".page", ".slot", ".column")


def _leaves(record: StepRecord) -> list[tuple[str, np.ndarray]]:
    """Every array of a record and its name, such as `decisions.found.page`."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), np.asarray(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(record)
    ]


def _decisions(record: StepRecord) -> Decisions:
    assert record.decisions is not None  # a trace has no other records
    return record.decisions


def unstacked(records: StepRecord) -> list[StepRecord]:
    """The records of the steps of a burst, from numpy arrays `[steps, ...]`, as a trace keeps them."""
    steps = range(records.uid.shape[0])
    return [_trimmed(jax.tree.map(lambda a, step=step: a[step], records)) for step in steps]


def _trimmed(record: StepRecord) -> StepRecord:
    """A record of numpy arrays without the unused places of its lists."""

    def cut(part: Any) -> Any:
        if not isinstance(part, Placed):
            return np.asarray(part)
        if part.count > part.most:
            raise RuntimeError(
                f"a step gave slots {part.count} pages in one way, and its record has room for {part.most}: the trace "
                "would not be whole; please report this"
            )
        used: dict[str, Any] = {
            name: np.array(getattr(part, name)[: part.count]) for name in ("page", "slot", "column")
        }
        return replace(part, **used)

    return jax.tree.map(cut, record, is_leaf=lambda part: isinstance(part, Placed))


def record_difference(one: StepRecord, other: StepRecord) -> str | None:
    """The first thing in which two records of numpy arrays are not the same to the bit, in words; None: nothing."""
    return _difference(dict(_leaves(one)), dict(_leaves(other)))


def _difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> str | None:
    for name in one:
        a, b = one[name], other[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{name} is {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
        if a.tobytes() != b.tobytes():  # to the bit: nan is nan, and -0.0 is not 0.0
            bits = [np.ascontiguousarray(x).view(f"V{x.itemsize}") for x in (np.atleast_1d(a), np.atleast_1d(b))]
            place = np.argwhere(bits[0] != bits[1])[0]
            at = f"[{', '.join(map(str, place))}]" if a.ndim else ""
            return f"{name}{at} is {np.atleast_1d(a)[tuple(place)]} and {np.atleast_1d(b)[tuple(place)]}"
    return None
