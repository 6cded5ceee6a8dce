"""Many threads on one engine, forks of its process, and an interpreter that ends with a stream open. Threads meet by
events and barriers; none waits for a time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from support.stories import MODEL, READER, TIGHT

from jpaged.request import FinishReason, Request, SamplingParams
from jpaged.runtime.engine import Engine
from jpaged.runtime.turns import Turns

PLAIN = replace(TIGHT, trace=False, preemption="recompute", swap_space_bytes=None, steps_per_burst=1)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def ask(name: str, prompt=(1, 2, 3), **changes) -> Request:
    return Request(name, tuple(prompt), replace(GREEDY, **changes))


def alone(prompt, count: int) -> list[int]:
    return READER.continuation(prompt, count)


@pytest.fixture(scope="module")
def engine():
    return Engine(READER, (), MODEL, PLAIN)


def together(*functions) -> None:
    """Runs each in a thread of its own; an error in one is raised here."""
    errors: list[BaseException] = []
    ready = threading.Barrier(len(functions))

    def guarded(function):
        try:
            ready.wait()
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_stats_submit_abort_and_warmup_beside_threads_that_run_bursts(engine):
    """U-02. Catches: an array that is read while a burst takes it; a dictionary that grows while it is walked; a
    request of one thread whose tokens another keeps."""
    got: dict[str, list] = {f"{t}.{n}": [] for t in range(3) for n in range(6)}
    done = threading.Event()
    answers = []

    def runs(thread: int):
        for n in range(6):
            name = f"{thread}.{n}"
            engine.submit(ask(name, (thread, n)), got[name])
            while not got[name] or got[name][-1].finish_reason is None:
                engine.drive(())
        if all(pieces and pieces[-1].finish_reason for pieces in got.values()):
            done.set()

    def looks():
        while not done.is_set():
            stats = engine.stats()
            answers.append(stats)
            assert stats.total_pages == stats.free_pages + stats.cached_pages + stats.in_use_pages
            assert stats.running >= 0 and stats.waiting >= 0

    def meddles():
        engine.warmup()
        for n in range(30):
            engine.submit(ask(f"gone {n}", (n,)))
            engine.abort(f"gone {n}")
            assert engine.unfinished() is not None and engine.label(1) != ""

    together(lambda: runs(0), lambda: runs(1), lambda: runs(2), looks, meddles)
    for name, pieces in got.items():
        thread, n = map(int, name.split("."))
        assert [token for piece in pieces for token in piece.token_ids] == alone((thread, n), 20)
    for event in engine.burst():  # what "gone" requests got before they were aborted; they have no sink
        assert event.request_id.startswith("gone")
    assert answers and engine.stats().in_use_pages == 0 and not engine.has_work


def test_events_and_sinks_do_not_mix(engine):
    """U-03: requests of `burst` and of sinks run together, whoever runs the burst."""
    pieces: list = []
    engine.submit(ask("mine", (5,)))
    engine.submit(ask("theirs", (6,)), pieces)
    for _ in range(4):
        engine.drive(())
    events = []
    while engine.has_work:
        events += engine.burst(ahead=True)
    assert [event.token_id for event in events] == alone((5,), 20)
    assert {event.request_id for event in events} == {"mine"}
    assert [token for piece in pieces for token in piece.token_ids] == alone((6,), 20)


def test_one_continuation_can_be_given_up(engine):
    """The others go on; its sink is told, once, and another id or index gives up nothing."""
    pieces: list = []
    engine.submit(ask("n", (7,), n=3), pieces)
    for _ in range(4):
        engine.drive(())
    engine.abort("n", index=1)
    engine.abort("n", index=7)
    engine.abort(["other"])
    while engine.has_work:
        engine.drive(())
    ends = [(piece.index, piece.finish_reason) for piece in pieces if piece.finish_reason]
    assert ends == [(1, FinishReason.ABORT), (0, FinishReason.LENGTH), (2, FinishReason.LENGTH)]
    assert [t for p in pieces if p.index == 2 for t in p.token_ids] == alone((7,), 20)
    engine.submit(ask("n"))  # the id is free again
    engine.abort("n")
    assert not engine.has_work


def test_a_closed_engine_says_so_to_whoever_waits_for_it():
    engine, pieces, begun = Engine(READER, (), MODEL, PLAIN), [], threading.Event()
    engine.submit(ask("a"), pieces)

    def runs():
        engine.drive(())
        begun.set()
        with pytest.raises(RuntimeError, match="it was closed; make a new one"):
            while True:
                engine.drive(())

    def closes():
        begun.wait()
        engine.close()

    together(runs, closes)
    with pytest.raises(RuntimeError, match="it was closed"):
        engine.submit(ask("b"))
    assert engine.stats().total_pages == PLAIN.num_pages
    engine.close()


def test_turns_are_taken_in_the_order_of_asking():
    """Catches: a thread that runs burst after burst and keeps all others out; a turn lost to one that was
    interrupted."""
    turns, order = Turns(), []
    threads = []
    with turns, turns:  # re-entrant
        assert not turns.take_if_free()
        for number in range(4):

            def take(number=number):
                with turns:
                    order.append(number)

            threads.append(threading.Thread(target=take))
            threads[-1].start()
            while len(turns._waiting) <= number:  # until it waits
                pass
        assert order == []
    with turns:
        order.append("again")
    for thread in threads:
        thread.join()
    assert order[:4] == [0, 1, 2, 3] and order[4] == "again"
    assert turns.take_if_free()
    turns.__exit__()


def test_a_fork_of_the_process_is_refused_in_words(engine):
    """U-16. Catches: a child that waits for threads which it does not have."""
    here = os.getpid()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: here + 1)  # as in a child; a real fork of this process warns
        for call in (lambda: engine.submit(ask("a")), engine.burst, lambda: engine.abort("a"), lambda: engine.state):
            with pytest.raises(
                RuntimeError, match=rf"made in process {here} and is used in {here + 1}, a fork .*spawn"
            ):
                call()
    assert not engine.has_work


OPEN = """
import sys
sys.path[:0] = sys.argv[1:]
from support.stories import MODEL, READER, TIGHT
from jpaged.bench.host import requests_of, stand_in_engine, words_tokenizer
from jpaged.runtime.streams import Streams
streams = Streams(stand_in_engine(slots=2), words_tokenizer())
kept = streams.events(streams.open(requests_of(4, tokens=9)))
next(kept)
"""


def test_a_script_that_ends_with_a_stream_open_says_nothing(pytestconfig):
    """U-15. Catches: a generator that gives up its requests when Python has taken its modules down."""
    folders = [str(pytestconfig.rootpath), str(pytestconfig.rootpath / "tests")]
    result = subprocess.run([sys.executable, "-c", OPEN, *folders], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
