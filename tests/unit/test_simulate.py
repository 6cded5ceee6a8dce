"""Simulations: that they schedule what the engine does, that runs side by side are those one by one, and the clock."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.shapes import STUB_MODEL

from jpaged.bench.workload import WorkloadRequest
from jpaged.config import EngineConfig
from jpaged.models.nothing import NoModel
from jpaged.policy import PolicyRequests, by_priority, first_come_first_served, shortest_prompt_first
from jpaged.request import Request, SamplingParams
from jpaged.runtime.costs import CostModel, Machine
from jpaged.runtime.engine import Engine
from jpaged.simulate import Simulation, Traffic, host, simulate
from jpaged.simulate.clock import Clock
from jpaged.simulate.traced import _ordered

#: A few pages, slots and rows: requests are preempted, and wait on the host.
TIGHT = EngineConfig(
    page_size=4, num_pages=14, max_num_seqs=3, max_num_batched_tokens=16, token_budgets=(16,), max_queue=2,
    max_model_len=40, steps_per_burst=1, dtype="float32",
)  # fmt: skip
#: A step takes 10 ms, whatever is in it.
STEP_S = 0.01
CONSTANT = CostModel(Machine("a clock", 1.0, 1.0, 1.0, STEP_S), 0, 0.0, 0.0, 0)
LOADS = (1.0, 3.0)
#: Of three system prompts of two pages each, with four priorities; some at once, some while others run.
TRAFFIC = Traffic.random(
    30, seed=3, per_s=25, prompt_tokens=(1, 14), output_tokens=(1, 16), priorities=(0, 0, 1, -2), groups=3,
    shared_tokens=8,
)  # fmt: skip


def longest_of(requests: PolicyRequests) -> jax.Array:
    """Who has the most tokens to come is kept, and served first."""
    return -requests.max_len


def simulated(traffic: Traffic = TRAFFIC, config: EngineConfig = TIGHT, **options) -> Simulation:
    return simulate(traffic, config, **{"costs": CONSTANT, "record": True, "use_tqdm": False, **options})


def really(traffic: Traffic, config: EngineConfig) -> Engine:
    """An engine with a trace after that traffic, which came while its clock went on by STEP_S in each burst."""
    model = replace(STUB_MODEL, vocab_size=2**31, max_position_embeddings=64)
    engine = Engine(NoModel(), (), model, replace(config, trace=True))
    submitted, microseconds = 0, 0
    came = np.rint(traffic.arrival_s * 1e6).astype(int)
    while submitted < len(traffic) or engine.has_work:
        if not engine.has_work:
            microseconds = max(microseconds, came[submitted])
        while submitted < len(traffic) and came[submitted] <= microseconds:
            params = SamplingParams(temperature=0, max_tokens=int(traffic.output_len[submitted]), ignore_eos=True)
            prompt, priority = tuple(traffic.prompt(submitted)), int(traffic.priority[submitted])
            engine.submit(Request(str(submitted), prompt, params, priority=priority))
            submitted += 1
        engine.burst()
        microseconds += round(STEP_S * 1e6)
    return engine


#: Rows for all, whose order is then the policy's alone: the simulation feeds by priority, the engine by its policy.
ROOMY = replace(TIGHT, max_queue=30)
#: More than are fed in one go, and all at once.
CROWDED = replace(ROOMY, admission=shortest_prompt_first, victim=first_come_first_served)


@pytest.mark.parametrize(
    ("config", "traffic"), [(ROOMY, TRAFFIC), (CROWDED, replace(TRAFFIC, arrival_s=0.0))], ids=["tight", "crowded"]
)
def test_the_schedule_is_the_engines(config, traffic):
    """Catches: requests that are fed later, or in another order, than the engine feeds them; policies that are not
    the configuration's; prompts that share other pages; anything that the simulation does for itself."""
    engine = really(traffic, config)
    (run,) = simulated(traffic, config).runs
    assert run.preemptions > 0 and run.prefix_hits > 0
    assert len(run.records) == run.steps == len(engine.trace)
    for number, (ours, theirs) in enumerate(zip(run.records, engine.trace.records, strict=True)):
        for name in (
            "uid", "scheduled", "sampled", "finish", "cached_tokens", "running", "waiting", "admitted", "preempted",
            "discarded", "recovered", "prefix_queries", "prefix_hits", "pages_in_use", "pages_cached", "tokens_stored",
        ):  # fmt: skip
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), (number, name)
    stats = engine.stats()
    assert (run.preemptions, run.prefix_hits, run.prefix_queries) == (
        stats.preemptions, stats.prefix_hits, stats.prefix_queries,
    )  # fmt: skip
    assert run.most_pages == max(record.pages_in_use for record in engine.trace.records)
    assert run.computed_tokens == sum(int(record.scheduled.sum()) for record in engine.trace.records)


def test_side_by_side_is_one_by_one(monkeypatch):
    """Catches: a run that is changed by its neighbours, or goes on when it has ended; numbers of policies, or loads,
    that are mixed up, also when those that have ended are left out."""
    policies = {
        "short": shortest_prompt_first,
        "default": by_priority,
        "odd": (lambda c: (c.arrival * 7919 % 13).astype(jnp.float32) - 6, longest_of),
    }
    with monkeypatch.context() as patch:
        patch.setattr(host, "STEPS", 8)
        patch.setattr(host, "WORTH_COMPILING_S", 0.0)
        together = simulated(policies=policies, loads=LOADS, record=False)
    assert len(together) == 6 and together.run("odd", load=3.0).records == ()
    odd = replace(TIGHT, admission=policies["odd"][0], victim=longest_of)
    for name, alone in {"default": simulated(loads=LOADS), "odd": simulated(config=odd, loads=(1.0,))}.items():
        for one in alone.runs:
            run = together.run(name, load=one.load)
            for figure in ("steps", "preemptions", "prefix_hits", "computed_tokens", "most_pages", "seconds"):
                assert getattr(run, figure) == getattr(one, figure), (run, figure)
            for figure in ("ttft_s", "latency_s", "arrival_s"):
                assert np.array_equal(getattr(run, figure), getattr(one, figure)), (run, figure)
    assert len({run.ttft_s.tobytes() for run in together.runs if run.load == 3.0}) == 3
    assert together.run("odd", load=1.0).steps > together.run("odd", load=3.0).steps  # it ends before


def test_times_by_hand():
    """A machine of 100 operations and 10 bytes a second, and a millisecond beside; weights of 1 byte, a token is 10
    operations, a pair 5, a key 1 byte. Two requests of 5 and 2 tokens, chunks of 4; the second finds nobody there.
    Catches: keys or pairs that are not those of the batch, times before a step's end, arrivals that are not waited
    for, padding that is not paid for."""
    costs = CostModel(Machine("slow", 100.0, 10.0, 1.0, 1e-3), 1, 10.0, 5.0, 1)
    config = replace(TIGHT, max_num_batched_tokens=4, token_budgets=(2, 4))
    (run,) = simulated(Traffic([0.5, 60.25], [5, 2], [3, 1]), config, costs=costs).runs
    assert [record.scheduled.sum() for record in run.records] == [4, 1, 1, 1, 2]
    computing = [(10 * tokens + 5 * pairs) / 100 for tokens, pairs in ((4, 10), (2, 5), (2, 6), (2, 7), (2, 3))]
    reading = [(1 + keys) / 10 for keys in (4, 5, 6, 7, 2)]
    assert np.argmax([computing, reading], axis=0).tolist() == [0, 1, 1, 1, 0]
    steps = np.maximum(computing, reading) + 1e-3
    np.testing.assert_allclose(run.arrival_s, [0.5, 60.25])
    np.testing.assert_allclose(run.ttft_s, [steps[:2].sum(), steps[4]], atol=1e-9)
    np.testing.assert_allclose(run.latency_s, [steps[:4].sum(), steps[4]], atol=1e-9)
    assert run.seconds == pytest.approx(60.25 + steps[4] - 0.5)
    assert run.output_tokens_per_s == pytest.approx(4 / run.seconds)


def test_nobody_gets_a_token_before_it_came():
    """Catches: requests that are fed before their time. Times are of whole steps, and every request has its own."""
    (run,) = simulated().runs
    assert (run.ttft_s >= STEP_S - 1e-9).all()
    least = (TRAFFIC.output_len - 1) * STEP_S
    assert (run.latency_s - run.ttft_s >= least - 1e-9).all()
    single = TRAFFIC.output_len == 1
    assert single.any() and np.array_equal(run.latency_s[single], run.ttft_s[single])


def test_who_matters_more_waits_less():
    """Catches: priorities that do not reach the queue."""
    (run,) = simulated(replace(TRAFFIC, arrival_s=0.0)).runs
    urgent, late = (run.ttft_s[TRAFFIC.priority == priority] for priority in (-2, 1))
    assert len(urgent) and len(late) and urgent.max() < late.min()


def test_pages_of_other_sizes():
    """Catches: a pool that grows with its pages, tables of the wrong size."""
    found = simulated(page_sizes=(2, 4))
    assert [(run.page_size, run.num_pages) for run in found.runs] == [(2, 29), (4, 14)]
    assert found.run(page_size=2).prefix_hits >= found.run(page_size=4).prefix_hits
    alone = simulated(config=replace(TIGHT, page_size=2, num_pages=29))
    assert np.array_equal(found.run(page_size=2).latency_s, alone.runs[0].latency_s)


def test_a_clock_is_exact():
    """Catches: microseconds that are not carried; float32, which loses them after minutes."""
    now = Clock(jnp.int32(100_000), jnp.int32(999_999))
    for _ in range(3):
        now = now.after(jnp.float32(1e-6))
    assert (int(now.seconds), int(now.microseconds)) == (100_001, 2)
    later = now.after(jnp.float32(12.25))
    assert later.to_float() == 100_013.250002
    assert bool(later.reaches(now)) and bool(now.reaches(now)) and not bool(now.reaches(later))
    times = np.array([0.0, 0.9999996, 1e5 + 0.3])
    np.testing.assert_allclose(Clock.of(times).to_float(), [0, 1, 1e5 + 0.3], rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32, jnp.float32, jnp.bfloat16, jnp.int8])
def test_numbers_of_policies_keep_their_order(dtype):
    """Catches: numbers of several dtypes that lose bits, or signs, when they are made one."""
    values = [-jnp.inf, -3e9, -2.5, -1, -0.0, 0, 1, 2.5, 3e9, jnp.inf]
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        values = [info.min, info.min + 1, -1 if info.min else 1, 2, info.max - 1, info.max]
    numbers = jnp.array(values, dtype)
    keys = _ordered(numbers)
    assert keys.dtype == jnp.int32
    assert np.array_equal(
        np.sign(np.diff(np.asarray(keys, np.int64))), np.sign(np.diff(np.asarray(numbers, np.float64)))
    )


def test_what_cannot_be_simulated_is_refused_in_words():
    """Catches: requests that are cut, a loop without an end, and arguments that do nothing."""
    for arguments, words in [
        (
            {"config": replace(TIGHT, max_model_len=30)},
            r"request \d+ has \d+ tokens, prompt and output; max_model_len is 30",
        ),
        ({"config": replace(TIGHT, max_model_len=60)}, "needs 15 pages of 4 tokens, but the pool has 14"),
        ({"page_sizes": (4, 30)}, "pages of 30 tokens, but the pool has 1"),
        ({"config": replace(TIGHT, num_pages=None)}, "a simulation needs num_pages"),
        ({"config": replace(TIGHT, preemption="swap")}, "preemption must be 'recompute', got 'swap'"),
        ({"loads": ()}, r"loads must be finite numbers above 0, at least one, got \(\)"),
        ({"loads": (1.0, 0.0)}, "loads must be finite numbers above 0"),
        ({"policies": []}, "policies must be None or name at least one"),
        ({"policies": {"a": "fifo"}}, "'a' must be a policy"),
        ({"policies": {"a": by_priority, "b": lambda c: c.arrival > 0}}, "a number, an array .*; it gave bool"),
        ({"policies": [by_priority, by_priority]}, "two policies have the same name"),
    ]:
        with pytest.raises(ValueError, match=words):
            simulated(**arguments)
    with pytest.raises(ValueError, match=r"2 runs have {}; there are: by_priority, load 1, pages of 4; by_pri"):
        replace(result := simulated(), runs=result.runs * 2).run()


def test_it_can_be_read():
    """Catches: figures under another's heading."""
    found = simulated(loads=LOADS)
    head, row = (next(line for line in repr(found).splitlines() if word in line) for word in ("p50", "by_priority"))
    columns = [[cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]] for line in (head, row)]
    shown = dict(zip(*columns, strict=True))
    run = found.runs[0]
    assert shown["load"] == "1" and shown["pages"] == f"{run.most_pages} of 14"
    assert shown["latency p50"] == f"{np.sort(run.latency_s)[14]:.2f}"
    assert shown["ttft p99"] == f"{run.ttft_s.max():.2f}"
    assert shown["preempted"] == f"{run.preemptions}" and shown["steps"] == f"{run.steps}"
    assert f"<td>{run.most_pages} of 14</td>" in found._repr_html_()
    assert "30 requests, 3 slots, 16 tokens a step, simulated for a clock in" in repr(found)
    assert "SimulatedRun(by_priority, load 1, pages of 4: 30 requests in" in repr(run)
    (axes,) = found.plot("ttft_s").axes
    assert [line.get_label() for line in axes.lines] == [run.name for run in found.runs]
    assert axes.lines[0].get_xdata()[-1] == run.ttft_s.max()
    with pytest.raises(ValueError, match="times must be one of"):
        found.plot("tokens")


# Traffic


def test_prompts_are_equal_where_they_are_said_to_be():
    """Catches: groups that share nothing, requests that share by accident, and levels in the wrong order."""
    traffic = Traffic(
        [0, 0, 0, 0],
        [9, 9, 9, 5],
        1,
        group=[[0, 7], [0, 7], [0, 8], [1, 1]],
        shared_len=[[3, 6], [3, 6], [3, 6], [2, 2]],
    )
    a, b, c, d = (traffic.prompt(index) for index in range(4))
    assert a[:6] == b[:6] and a[:3] == c[:3] and len(d) == 5
    tokens = [*a, *b[6:], *c[3:], *d]
    assert len(set(tokens)) == len(tokens)
    assert min(tokens) >= 0 and max(tokens) < 2**31


def test_traffic_of_a_workload_shares_what_it_shares():
    """Catches: prompts that share more, or less, than the workload's."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 2, rng.integers(1, 9)).tolist()) for _ in range(40)]
    workload = [WorkloadRequest(str(i), float(-i % 7), prompt, 1 + i % 3) for i, prompt in enumerate(prompts)]
    traffic = Traffic.of(workload)
    workload.sort(key=lambda request: request.arrival_s)
    assert traffic.arrival_s.tolist() == [request.arrival_s for request in workload]
    assert traffic.output_len.tolist() == [request.max_tokens for request in workload]

    def common(a, b):
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    ours, theirs = [traffic.prompt(index) for index in range(40)], [request.prompt_token_ids for request in workload]
    for i in range(40):
        for j in range(40):
            assert common(ours[i], ours[j]) == common(theirs[i], theirs[j]), (theirs[i], theirs[j])


def test_random_traffic_is_what_was_asked_for():
    traffic = Traffic.random(
        5000,
        seed=1,
        per_s=20,
        prompt_tokens=(4, 64),
        output_tokens=(2, 9),
        priorities=(3, 4),
        groups=7,
        shared_tokens=5,
    )
    assert traffic.arrival_s[-1] == pytest.approx(250, rel=0.1) and traffic.arrival_s[0] == 0
    for lengths, low, high in ((traffic.prompt_len, 9, 69), (traffic.output_len, 2, 9)):
        assert (lengths.min(), lengths.max()) == (low, high)
    assert set(traffic.priority.tolist()) == {3, 4} and set(traffic.group.ravel().tolist()) == set(range(7))
    assert np.median(traffic.prompt_len - 5) == pytest.approx(16, abs=1.5)  # log-uniform
    again = Traffic.random(5000, seed=1, per_s=20, prompt_tokens=(4, 64), output_tokens=(2, 9))
    assert np.array_equal(again.arrival_s, traffic.arrival_s)
    assert "Traffic(5,000 requests in 2" in repr(traffic)
    assert Traffic.random(3, seed=1, per_s=np.inf).arrival_s.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"arrival_s": [1, 0]}, r"arrival_s of request 1 must be no less than that of the one before: .*, got 0"),
        ({"arrival_s": [0, np.nan]}, "arrival_s of request 1 must be a finite number"),
        ({"arrival_s": []}, "traffic needs at least one request"),
        ({"prompt_len": [1, 2, 3]}, r"prompt_len must have an entry for each of 2 requests, got shape \(3,\)"),
        ({"prompt_len": [4.5, 4]}, "prompt_len must be numbers that fit in int32, got float64, up to 4.5"),
        ({"output_len": [0, 1]}, "output_len of request 0 must be at least 1, got 0"),
        ({"priority": 2**40}, "priority must be numbers that fit in int32"),
        ({"shared_len": [9, 10]}, r"shared_len of request 1 must be no more than its prompt_len, got \[10\]"),
        ({"shared_len": [[3, 2]] * 2, "group": [[1, 2]] * 2}, "no less than on the level before"),
        ({"shared_len": [[3, 4]] * 2}, "must have the same levels"),
    ],
)
def test_traffic_that_is_none_is_refused_in_words(fields, words):
    given = {"arrival_s": [0, 1], "prompt_len": 9, "output_len": 1}
    with pytest.raises(ValueError, match=words):
        Traffic(**{**given, **fields})
    with pytest.raises(ValueError, match=r"prompt_tokens must be \(low, high\)"):
        Traffic.random(1, seed=0, per_s=1, prompt_tokens=(5, 4))
    with pytest.raises(ValueError, match="per_s more than 0"):
        Traffic.random(1, seed=0, per_s=0)
