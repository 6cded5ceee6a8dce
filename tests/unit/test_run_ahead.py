"""The host runs ahead of the device: what it starts and reads in which order, and that nothing that comes out depends
on it. No test looks at a clock."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from support.stories import MODEL, READER, TIGHT

from jpaged.record.replay import replay
from jpaged.record.saving import Saved
from jpaged.request import FinishReason, Request, SamplingParams
from jpaged.runtime import core
from jpaged.runtime.engine import Engine
from jpaged.step import violations

PLAIN = replace(TIGHT, trace=False, preemption="recompute", swap_space_bytes=None)
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
#: Of the host's two ways to choose a step's size beside a burst that runs: by what it foresees, or when the burst ends.
BOTH = pytest.mark.parametrize("foresees", [False, True])


def make(**changes) -> Engine:
    return Engine(READER, (), MODEL, replace(PLAIN, **changes))


def ask(name: str, prompt=(1, 2, 3), **changes) -> Request:
    return Request(name, tuple(prompt), replace(GREEDY, **changes))


def alone(prompt, count: int) -> list[int]:
    return READER.continuation(prompt, count)


def run(engine: Engine, got=None, at_burst=lambda burst: None) -> dict[str, list[int]]:
    """Runs ahead until nothing is left; ids by request, or request and continuation."""
    got = {} if got is None else got
    for burst in range(500):
        if not engine.has_work:
            return got
        for event in engine.burst(ahead=True):
            if event.token_id is not None:
                name = event.request_id if event.index == 0 else f"{event.request_id}.{event.index}"
                got.setdefault(name, []).append(event.token_id)
        at_burst(burst)
    raise AssertionError("the engine makes no progress")


def mix(count: int) -> list[Request]:
    rng = np.random.default_rng(1)
    return [
        ask(f"r{n}", rng.integers(0, 30, rng.integers(1, 12)).tolist(), max_tokens=int(rng.integers(1, 14)))
        for n in range(count)
    ]


class Log:
    """The order in which bursts are started and read, with the host's work in between."""

    def __init__(self, engine: Engine, monkeypatch):
        self.lines: list[str] = []
        self._number = {"start": 0, "read": 0}
        launch, read = engine.device.launch, core.read
        monkeypatch.setattr(engine.device, "launch", lambda *a: self._say("start") or launch(*a))
        monkeypatch.setattr(core, "read", lambda *a: self._say("read") or read(*a))

    def _say(self, what: str) -> None:
        self._number[what] += 1
        self.lines.append(f"{what} {self._number[what]}")


@BOTH
def test_the_next_burst_is_started_before_the_last_is_read(foresees, monkeypatch):
    """Catches: a device that waits for Python between two bursts: whatever the host does with what it read, it does
    while a burst runs. And one without `ahead`, whose state is a burst further than what it returned."""
    engine = make(async_scheduling=foresees, steps_per_burst=1)
    engine.submit(ask("a", max_tokens=5))
    log = Log(engine, monkeypatch)
    got = run(engine, at_burst=lambda burst: log.lines.append("host"))
    assert got == {"a": alone((1, 2, 3), 5)}
    assert log.lines == [
        "start 1", "start 2", "read 1", "host", "start 3", "read 2", "host", "start 4", "read 3", "host",
        "start 5", "read 4", "host", "read 5", "host",
    ]  # fmt: skip
    log.lines.clear()
    engine.submit(ask("a", max_tokens=2))
    while engine.has_work:
        engine.burst()
    assert log.lines == ["start 6", "read 6", "start 7", "read 7"]


def test_a_clock_that_only_bursts_and_the_host_move_shows_no_wait(monkeypatch):
    """A burst takes 10 of a made-up clock, the host's work after each 5. The device is never idle, so n bursts take
    10 n and the host's last 5; one after the other they would take 15 n."""
    engine = make(steps_per_burst=1, async_scheduling=True)
    engine.submit(ask("a", max_tokens=20))
    clock = {"host": 0, "device": 0}
    launch, ready = engine.device.launch, []

    def started(*arguments):
        clock["device"] = max(clock["device"], clock["host"]) + 10  # behind what runs
        ready.append(clock["device"])
        return launch(*arguments)

    read = core.read

    def waited(*arguments):
        clock["host"] = max(clock["host"], ready.pop(0)) + 5
        return read(*arguments)

    monkeypatch.setattr(engine.device, "launch", started)
    monkeypatch.setattr(core, "read", waited)
    assert run(engine) == {"a": alone((1, 2, 3), 20)}
    assert clock == {"host": 20 * 10 + 5, "device": 20 * 10}


@BOTH
@pytest.mark.parametrize("steps", [1, 3])
def test_no_token_depends_on_it(foresees, steps):
    """More requests than rows, preempted ones among them, one that stops by a token, four continuations. Catches: a
    request fed twice, or one whose row is given away while a burst that has it runs."""
    engine = make(async_scheduling=foresees, steps_per_burst=steps)
    requests = mix(14)
    stop = alone((4, 5), 9)[3]
    extra = [ask("stop", (4, 5), stop_token_ids=[stop]), ask("n", (6, 7), n=4, temperature=1.0, seed=5)]
    for one in [*requests, *extra]:
        engine.submit(one)
    got = run(engine)
    slow = make(steps_per_burst=1)
    slow.submit(extra[1])
    expected = {}
    while slow.has_work:
        for event in slow.burst():
            expected.setdefault("n" if event.index == 0 else f"n.{event.index}", []).append(event.token_id)
    expected |= {r.request_id: alone(r.prompt_token_ids, r.params.max_tokens) for r in requests}
    expected["stop"] = alone((4, 5), 9)[: alone((4, 5), 9).index(stop) + 1]
    assert got == expected
    assert engine.stats().preemptions > 0 or steps == 3
    stats = engine.stats()
    assert (stats.in_use_pages, stats.running, stats.waiting) == (0, 0, 0) and violations(engine.state) == []
    assert len(engine.history) == stats.steps


@BOTH
def test_aborts_and_forks_beside_a_burst_that_runs(foresees):
    """What a burst in flight says of a request that was given up is left out; a fork begins with what it says of its
    parent."""
    engine = make(async_scheduling=foresees, steps_per_burst=1)
    for name in ("a", "b"):
        engine.submit(ask(name, max_tokens=12))
    engine.submit(ask("n", (9,), n=2, max_tokens=12))
    got: dict[str, list[int]] = {}
    begun = ()

    def at(burst):
        nonlocal begun
        if burst == 3:
            engine.abort("b")
            engine.abort("n", index=1)
            assert violations(engine.state) == []
        if burst == 4:
            begun = engine.fork("a", "branch", seed=1)

    run(engine, got, at)
    assert got["a"] == alone((1, 2, 3), 12) and got["n"] == alone((9,), 12)
    assert 0 < len(got["b"]) < 12 and 0 < len(got["n.1"]) < 12
    assert len(begun) > 0 and [*begun, *got["branch"]] == alone((1, 2, 3), 12)


@BOTH
def test_a_trace_is_replayed_to_the_bit_and_pages_are_swapped(foresees):
    """Catches: an input that is noted after a burst that was started before it, or the other way round; an exchange
    that a replay does not repeat."""
    engine = Engine(READER, (), MODEL, replace(TIGHT, async_scheduling=foresees))
    requests = mix(12)
    for one in requests:
        engine.submit(one)

    def at(burst):
        if burst == 2:
            engine.abort("r7")
            engine.submit(ask("late", (8, 8), max_tokens=3))

    got = run(engine, at_burst=at)
    got.pop("r7", None)
    for one in requests:
        if one.request_id != "r7":
            assert got[one.request_id] == alone(one.prompt_token_ids, one.params.max_tokens)
    assert engine.stats().swaps > 0
    jax.tree.map(np.testing.assert_array_equal, replay(engine.trace, READER, ()), engine.state)
    assert len(engine.trace) == engine.stats().steps == len(engine.trace.budgets)


@BOTH
def test_a_snapshot_between_two_bursts_has_all_that_was_started(foresees, tmp_path):
    engine = make(async_scheduling=foresees)
    requests = mix(9)
    for one in requests:
        engine.submit(one)
    got: dict[str, list[int]] = {}
    for _ in range(3):
        for event in engine.burst(ahead=True):
            got.setdefault(event.request_id, []).append(event.token_id)
    path = engine.save_state(tmp_path / "saved")
    other = make(async_scheduling=foresees)
    other.load_state(Saved(path))
    seen = {request.request_id: [e.token_id for e in events] for request, events in other.unfinished()}
    theirs = run(other)
    mine = run(engine, got)
    assert mine == {r.request_id: alone(r.prompt_token_ids, r.params.max_tokens) for r in requests}
    for name, tokens in seen.items():
        assert tokens + theirs.get(name, []) == mine[name]
    assert engine.unfinished() == other.unfinished() == []


@BOTH
@pytest.mark.parametrize("lost", [False, True])
def test_a_burst_that_fails_costs_no_request(lost, foresees, monkeypatch):
    """With a burst in flight that was not read. Catches: tokens given out twice, or never, after the state was made
    anew; a seed drawn again; what waits on the host forgotten."""
    engine = make(async_scheduling=foresees, seed=3)
    requests = [replace(one, params=replace(one.params, temperature=1.0)) for one in mix(9)]
    requests.append(ask("n", (6, 7), n=2))
    calm = make(seed=3)
    for one in requests:
        engine.submit(one)
        calm.submit(one)
    expected = run(calm)
    got: dict[str, list[int]] = {}
    launch, calls = engine.device.launch, iter(range(1000))

    def failing(*arguments):
        if next(calls) == 4:
            if lost:
                launch(*arguments)  # takes the state, and the result is thrown away
                jax.tree.map(lambda leaf: leaf.delete(), engine.device.state)
            raise RuntimeError("the device fell over")
        return launch(*arguments)

    monkeypatch.setattr(engine.device, "launch", failing)
    with pytest.raises(RuntimeError, match="fell over") as failed:
        run(engine, got)
    (note,) = failed.value.__notes__
    assert ("was lost, and" if lost else "is whole") in note and note.endswith("requests that were lost: none")
    assert run(engine, got) == expected
    assert engine.stats().in_use_pages == 0 and violations(engine.state) == []


def test_a_piece_that_was_interrupted_costs_its_request_and_no_other():
    """Catches: a request that gets its tokens twice; an interrupt that costs all who run."""

    class Interrupts(list):
        def append(self, piece):
            super().append(piece)
            if not piece.lost:
                raise KeyboardInterrupt

    engine, bad, good = make(), Interrupts(), []
    engine.submit(ask("bad", (4, 5)), bad)
    engine.submit(ask("good"), good)
    with pytest.raises(KeyboardInterrupt) as caught:
        engine.burst()
    assert caught.value.__notes__[0].endswith("requests that were lost: ['bad']")
    while engine.has_work:
        engine.burst(ahead=True)
    assert [piece.lost for piece in bad] == [False, True]
    assert [token for piece in good for token in piece.token_ids] == alone((1, 2, 3), 9)
    assert good[-1].finish_reason is FinishReason.LENGTH


def test_an_error_while_cleaning_up_hides_nothing(monkeypatch):
    """The first error passes on with the second in a note, and what is called afterwards says why it cannot run."""
    engine = make()
    engine.submit(ask("a"))
    monkeypatch.setattr(engine.device, "launch", lambda *_: 1 / 0)
    monkeypatch.setattr(engine.device, "_start_empty", lambda: [][0])
    engine.device.moving = True
    with pytest.raises(ZeroDivisionError) as failed:
        engine.burst()
    assert "could not start again: IndexError" in failed.value.__notes__[0]
    with pytest.raises(RuntimeError, match=r"cannot be used any more: after ZeroDivisionError.*IndexError"):
        engine.submit(ask("b"))


def test_beams_keep_the_host_from_running_ahead(monkeypatch):
    """Their next token is the host's to say."""
    engine = make()
    engine.submit(replace(ask("b", (1,), n=2, max_tokens=4), candidates=4))
    log = Log(engine, monkeypatch)
    offers = [event for _ in range(3) for event in engine.burst(ahead=True) if event.candidates]
    assert {event.index for event in offers} == {0, 1}
    assert log.lines[0] == "start 1" and not any(
        one.startswith("start") and other.startswith("start")
        for one, other in zip(log.lines[2:], log.lines[3:], strict=False)
    )
    engine.advance("b", [(0, 5), (0, 6)])
    assert any(event.candidates for event in engine.burst(ahead=True))
