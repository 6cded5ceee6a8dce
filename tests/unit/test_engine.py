"""The host's side: queueing, limits, aborts, failures, counts. A stub decoder reads the pool back, so that a token that
is lost, stale or someone else's shows in what it emits."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from support.shapes import ENGINE, MODEL, READER, TIGHT, VOCAB
from support.stubs import ScriptDecoder, Traces

from jpaged.baseline.static import StaticEngine
from jpaged.request import FinishReason, Request, SamplingParams
from jpaged.runtime import core
from jpaged.runtime.engine import Engine
from jpaged.step import violations

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


COUNTER = ScriptDecoder(VOCAB, successor=tuple((i + 1) % VOCAB for i in range(VOCAB)))


def make(decoder=READER, **changes) -> Engine:
    return Engine(decoder, (), MODEL, replace(ENGINE, **changes))


def request(name: str, prompt, params=GREEDY) -> Request:
    return Request(name, tuple(prompt), params)


def drain(engine, at_burst=lambda burst: None) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    bursts = 0
    while engine.has_work:
        for event in engine.burst():
            if event.token_id is not None:
                tokens.setdefault(event.request_id, []).append(event.token_id)
        at_burst(bursts)
        bursts += 1
        assert bursts < 2000, "the engine makes no progress"
    return tokens


def alone(decoder, prompt, count) -> list[int]:
    return decoder.continuation(prompt, count)


def mix(count: int, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        request(str(i), rng.integers(0, 30, rng.integers(1, 30)).tolist(), replace(GREEDY, max_tokens=int(n)))
        for i, n in enumerate(rng.integers(1, 20, count))
    ]


def test_many_more_requests_than_rows_all_get_their_own_tokens():
    """The device holds 7 requests; the host feeds it the rest, in order."""
    engine, decoder = make(), READER
    requests = mix(60)
    for one in requests:
        engine.submit(one)
    found = drain(engine)
    for one in requests:
        assert found[one.request_id] == alone(decoder, one.prompt_token_ids, one.params.max_tokens)
    stats = engine.stats()
    assert (stats.in_use_pages, stats.running, stats.waiting) == (0, 0, 0)
    assert stats.useful_row_steps + stats.wasted_row_steps == sum(step.budget for step in engine.history)


def test_thousands_of_requests_take_the_memory_of_a_few():
    """Catches: a state, or a number of programs, that grows with what waits on the host; a queue there that is searched
    or copied for each request."""
    engine = make()
    lengths = [replace(GREEDY, max_tokens=count) for count in (1, 2, 3)]
    requests = [request(str(n), range(n % 8, 9 + n % 5), lengths[n % 3]) for n in range(3000)]
    before = jax.tree.map(lambda a: (a.shape, a.dtype), engine.state)
    for one in requests:
        engine.submit(one)
    found: dict[str, list[int]] = {}
    for _ in range(6000):
        for event in engine.burst():
            found.setdefault(event.request_id, []).append(event.token_id)
        if not engine.has_work:
            break
    assert jax.tree.map(lambda a: (a.shape, a.dtype), engine.state) == before
    assert engine.num_programs == 2 and max(step.running for step in engine.history) == 4
    expected = {prompt: alone(READER, prompt, 3) for prompt in {one.prompt_token_ids for one in requests}}
    assert found == {r.request_id: expected[r.prompt_token_ids][: r.params.max_tokens] for r in requests}


def test_burst_length_does_not_change_a_token():
    results = []
    for steps in (1, 3):
        engine = make(steps_per_burst=steps, token_budgets=(16,) if steps == 1 else (4, 16))
        for one in mix(12):
            engine.submit(one)
        results.append(drain(engine))
    assert results[0] == results[1]


def test_static_batching_emits_the_same():
    requests = mix(11)
    static = StaticEngine(READER, (), MODEL, batch_size=4, max_model_len=64)
    engine = make()
    for one in requests:
        static.submit(one)
        engine.submit(one)
    # The stub checks that each token stands at its place, so this also proves that static rows keep theirs.
    assert drain(static) == drain(engine)
    assert static.stats().in_use_pages == 0
    assert static.stats().useful_row_steps == engine.stats().useful_row_steps


def test_a_static_batch_waits_for_its_longest():
    static = StaticEngine(READER, (), MODEL, batch_size=2, max_model_len=64)
    for name, count in (("a", 2), ("b", 10), ("c", 1)):
        static.submit(request(name, [1, 2, 3], replace(GREEDY, max_tokens=count)))
    tokens = drain(static)
    # One chunk of prompts, then 9 steps for b; then c's batch, which is done after its prompt.
    assert [step.scheduled_tokens for step in static.history] == [6, 2, *[1] * 8, 3]
    assert [step.budget for step in static.history] == [32, *[2] * 9, 32]
    # Given up while one batch runs and another waits, it is ready for the next.
    for name in ("d", "e", "f"):
        static.submit(request(name, [4, 5]))
    static.burst()
    static.abort_all()
    assert not static.has_work
    static.submit(request("b", [1, 2, 3], replace(GREEDY, max_tokens=10)))
    assert drain(static) == {"b": tokens["b"]}


def test_no_mix_compiles_anything_after_warmup(capsys):
    """JX-01: a limit that is no power of two, prompts of every length, found computed and not."""
    decoder = ScriptDecoder(VOCAB, traces=Traces())
    engine = make(decoder, max_model_len=61, num_pages=40, token_budgets=(4, 16))
    engine.warmup(use_tqdm=True)
    assert f"Compiling program {engine.num_programs} of {engine.num_programs}: 100%" in capsys.readouterr().err  # U-39
    programs, traces = engine.num_programs, decoder.traces.count
    for length in range(1, 61):
        engine.submit(request(f"r{length}", [length % 30] * length, replace(GREEDY, max_tokens=3)))
    drain(engine)
    assert engine.stats().prefix_hits == 0
    for reset in (False, True, False):
        if reset:
            assert engine.reset_prefix_cache()
        for length in range(40, 61):
            engine.submit(request(f"r{length}", [7] * length, replace(GREEDY, max_tokens=3)))
        drain(engine)
    assert engine.stats().prefix_hits > 0
    assert (engine.num_programs, decoder.traces.count) == (programs, traces)


def test_a_larger_program_is_run_before_a_further_one_is_compiled_unless_half_of_it_is_padding():
    """Each request generates one token, so that its one step is as large as its prompt."""
    engine = make(token_budgets=(8, 12, 16), enable_prefix_caching=False)  # the prompts begin alike

    def ran(length: int) -> tuple[int, int]:
        """The budget of the one step that such a prompt takes, and how many programs steps have had by then."""
        engine.submit(request("r", range(length), replace(GREEDY, max_tokens=1)))
        steps = engine.stats().steps
        assert drain(engine) == {"r": alone(READER, range(length), 1)}
        assert engine.stats().steps == steps + 1
        return engine.history[-1].budget, engine.num_programs - 1  # one of them submits

    assert ran(16) == (16, 1)
    assert ran(10) == (16, 1)  # 12 holds it, but is not compiled
    assert ran(5) == (8, 2)  # in 16, more than half were padding
    assert ran(7) == (8, 2)
    engine.program(12)
    assert ran(10)[0] == 12


def test_a_prompt_that_can_never_run_is_refused_in_words():
    engine = make(num_pages=8, max_model_len=None)  # PR-04: 8 pages of 4
    assert engine.config.max_model_len == 32
    with pytest.raises(ValueError, match=r"33 tokens and needs 9 pages of 4.* 8 pages"):
        engine.submit(request("big", [1] * 33))
    with pytest.raises(ValueError, match="empty"):
        engine.submit(request("empty", []))
    for bad in (VOCAB, -1, 1.5, True):
        with pytest.raises(ValueError, match=r"\[0, 32\)"):
            engine.submit(request("bad", [1, bad]))
    with pytest.raises(ValueError, match=r"\[40\].*vocabulary of 32"):
        engine.submit(request("stop", [1], SamplingParams(stop_token_ids=[40], min_tokens=1)))
    engine.submit(request("good", [1, 2]))
    with pytest.raises(ValueError, match="in use"):
        engine.submit(request("good", [1, 2]))
    assert drain(engine)["good"] == alone(READER, [1, 2], 8)


def test_lengths_end_at_max_model_len():
    """ST-05: a huge max_tokens is cut by max_model_len; a prompt that fills it ends at once."""
    engine = make(**TIGHT)
    for length, asked, got in ((32, 5, 0), (28, 10, 4), (3, 10**9, 29), (1, None, 31)):
        engine.submit(request("r", [1] * length, replace(GREEDY, max_tokens=asked)))
        events = []
        while engine.has_work:
            events += engine.burst()
        assert sum(e.token_id is not None for e in events) == got
        assert events[-1].finish_reason == FinishReason.LENGTH
        assert max((s.pages_in_use for s in engine.history), default=0) <= 8


def test_sizes_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="needs 16 pages of 4 tokens, but the pool has 8"):
        make(num_pages=8, max_model_len=64)
    with pytest.raises(ValueError, match="more than the 64 tokens"):
        make(max_model_len=65)
    with pytest.raises(ValueError, match="at least 2 are needed"):
        make(num_pages=None, pool_bytes=100, max_model_len=None)
    assert (
        make(num_pages=None, pool_bytes=64 * 33, max_model_len=None).config.num_pages == 32
    )  # 64 bytes a page, one is scratch


def test_a_lone_request_that_fills_the_pool_ends():
    """PR-04: within as many steps as the pool has tokens, and five."""
    engine = make(num_pages=8, max_model_len=None)
    engine.submit(request("r", [1], replace(GREEDY, max_tokens=None)))
    assert len(drain(engine)["r"]) == 31
    assert engine.stats().steps <= 32 + 5


def test_preempted_requests_keep_their_tokens():
    engine, decoder = make(**TIGHT), READER
    requests = [request(str(i), [i + 1] * 5, replace(GREEDY, max_tokens=20)) for i in range(6)]
    for one in requests:
        engine.submit(one)
    found = drain(engine, lambda _: violations(engine.state) == [])
    assert engine.stats().preemptions > 0
    for one in requests:
        assert found[one.request_id] == alone(decoder, one.prompt_token_ids, 20)


@pytest.mark.parametrize("when", [0, 1, 3])
def test_abort_in_any_state_gives_every_page_back(when):
    engine, decoder = make(), READER
    requests = [request(str(i), [i + 1] * 9, replace(GREEDY, max_tokens=12)) for i in range(9)]
    for one in requests:
        engine.submit(one)
    for _ in range(when):
        engine.burst()
    engine.abort(["0", "3", "8", "unknown"])  # running (or not yet fed), waiting on the device, waiting on the host
    assert violations(engine.state) == []
    found = drain(engine)
    for one in requests:
        if one.request_id not in ("0", "3", "8"):
            assert found[one.request_id][-1] == alone(decoder, one.prompt_token_ids, 12)[-1]
    engine.abort_all()
    stats = engine.stats()
    assert stats.free_pages + stats.cached_pages == 24 and stats.in_use_pages == 0


def test_a_row_of_nan_fails_alone():
    """NU-03: and what it left in its pages does not reach those who get them next."""
    engine = make(**TIGHT)
    for name, prompt in (("a", [1, 2, 3]), ("sick", [4, 31, 5]), ("b", [6, 6]), *((f"n{i}", [i]) for i in range(5))):
        engine.submit(request(name, prompt))
    events = []
    while engine.has_work:
        events += engine.burst()
    sick = [e for e in events if e.request_id == "sick"]
    assert [(e.token_id, e.finish_reason) for e in sick] == [(None, FinishReason.ERROR)]
    for name, prompt in (("a", [1, 2, 3]), ("b", [6, 6]), ("n4", [4])):
        assert [e.token_id for e in events if e.request_id == name] == alone(READER, prompt, 8)


def test_a_failing_device_call_loses_no_request(monkeypatch):
    """JX-03: the pool was donated to a call that raised; requests go on in a new one, from what they had got."""
    engine = make()
    engine.submit(request("a", [1, 2]))
    before = [event.token_id for _ in range(3) for event in engine.burst()]
    program = engine.device.program

    def failing(budget, candidates):
        def call(params, state):
            program(budget, candidates)(params, state)  # takes the buffers
            raise RuntimeError("the device fell over")

        return call

    monkeypatch.setattr(engine.device, "program", failing)
    with pytest.raises(RuntimeError, match="fell over") as failed:
        engine.burst()
    assert "1 requests are computed again" in failed.value.__notes__[0]
    monkeypatch.undo()
    assert 0 < len(before) < 8 and before + drain(engine)["a"] == alone(READER, [1, 2], 8)
    assert engine.stats().in_use_pages == 0


def test_an_interrupt_leaves_an_engine_that_works(monkeypatch):
    engine = make()
    requests = mix(5)
    for one in requests:
        engine.submit(one)
    got = {one.request_id: [] for one in requests}
    for event in engine.burst():
        got[event.request_id].append(event.token_id)
    figures = core.figures_of_steps
    interrupts = iter([KeyboardInterrupt])

    def interrupted(*arguments):
        for interrupt in interrupts:
            raise interrupt
        return figures(*arguments)

    monkeypatch.setattr(core, "figures_of_steps", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        engine.burst()
    assert "state is whole; requests that were lost: none" in caught.value.__notes__[0]
    for name, tokens in drain(engine).items():
        got[name] += tokens
    assert got == {r.request_id: alone(READER, r.prompt_token_ids, r.params.max_tokens) for r in requests}
    assert engine.stats().in_use_pages == 0


def test_stop_tokens_and_reasons():
    """The model's own token ends a request without a stop_reason; a named one is the stop_reason."""
    engine = make(COUNTER)
    ask = SamplingParams(temperature=0, max_tokens=20)
    engine.submit(request("own", [27], ask))
    engine.submit(request("named", [27], replace(ask, stop_token_ids=[29, 30])))
    engine.submit(request("ignored", [27], replace(ask, ignore_eos=True, max_tokens=6)))
    engine.submit(request("late", [27], replace(ask, stop_token_ids=[29], min_tokens=2, max_tokens=3)))
    ends, tokens = {}, {}
    while engine.has_work:
        for event in engine.burst():
            tokens.setdefault(event.request_id, []).append(event.token_id)
            if event.finish_reason:
                ends[event.request_id] = (event.finish_reason, event.stop_reason)
    assert (tokens["own"], ends["own"]) == ([28, 29, 30, 31], (FinishReason.STOP, None))
    assert (tokens["named"], ends["named"]) == ([28, 29], (FinishReason.STOP, 29))
    assert (tokens["ignored"], ends["ignored"]) == ([28, 29, 30, 31, 0, 1], (FinishReason.LENGTH, None))
    # 29 may not be sampled as the second token; what follows it in the stub's order is 30.
    assert tokens["late"] == [28, 30, 31] and ends["late"] == (FinishReason.STOP, None)


def test_time_to_first_token_counts_all_chunks():
    """CP-03: budget 16, a prompt of 32: the first token comes out of the second step, not the first."""
    for length, steps in ((32, 2), (63, 4)):
        engine = make()
        engine.submit(request("r", [1] * length))
        bursts = 0
        while not any(e.token_id is not None for e in engine.burst()):
            bursts += 1
        assert bursts + 1 == steps


def test_closing_frees_the_pool():
    engine = make()
    leaves = jax.tree.leaves(engine.state)
    engine.close()
    engine.close()
    assert all(leaf.is_deleted() for leaf in leaves)
