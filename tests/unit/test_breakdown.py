"""Where the time of a run goes: on a program by hand, on made-up profiles, and on a tiny model's engine."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from support.tiny import tiny_config, tiny_decoder

from jpaged.bench import breakdown as module
from jpaged.bench.breakdown import (
    CATEGORIES,
    Breakdown,
    BudgetProfile,
    break_down,
    check_breakdown,
    parse_program,
    read_operations,
)
from jpaged.bench.measure import EngineAdapter
from jpaged.bench.workload import Workload, WorkloadRequest, synthetic_workload
from jpaged.config import EngineConfig
from jpaged.runtime.engine import Engine

#: A loop over steps with attention, its loop, and a loop in that without a name; a sampler with two branches; and a
#: call that is one kernel. As XLA prints them, less shapes and layouts.
HLO = """HloModule jit_run, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

FunctionNames
1 "paged_attention"

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum.1 = f32[] add(%x, %y)
}

%fused_dot (p.1: f32[4], p.2: f32[4]) -> f32[4] {
  %p.1 = f32[4]{0} parameter(0)
  ROOT %dot.1 = f32[4]{0} dot(%p.1, %p.2), metadata={op_name="jit(run)/while/body/dot_general" stack_frame_id=1}
}

%fused_scores (p.3: f32[4]) -> f32[4] {
  ROOT %inner = f32[4]{0} fusion(%p.3), kind=kLoop, calls=%fused_dot
}

%fused_copy (p.4: f32[4]) -> f32[4] {
  ROOT %copy.9 = f32[4]{0} copy(%p.4)
}

%inner_body (t.1: (s32[], f32[4])) -> (s32[], f32[4]) {
  %deep_copy = f32[4]{0} copy(%t.1)
  ROOT %tuple.1 = (s32[], f32[4]{0}) tuple(%i, %deep_copy)
}

%inner_cond (t.2: (s32[], f32[4])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%attention_body (t.3: (s32[], /*index=1*/f32[4])) -> (s32[], f32[4]) {
  %scores = f32[4]{0} fusion(%t.3), kind=kCustom, calls=%fused_scores, metadata={op_name="jit(run)/while/body/jit(paged_attention_xla)/while/body/dot_general"}
  %exp.1 = f32[4]{0} exponential(%scores), metadata={op_name="jit(run)/while/body/jit(paged_attention_xla)/while/body/exp"}
  %window = f32[4]{0} reduce-window(%exp.1), window={size=2}, to_apply=%add, metadata={stack_frame_id=3}
  ROOT %while.3 = (s32[], /*index=1*/f32[4]{0}) while(%t.4), condition=%inner_cond, body=%inner_body
}

%attention_cond (t.5: (s32[], f32[4])) -> pred[] {
  ROOT %less.2 = pred[] compare(%i, %n), direction=LT, metadata={op_name="jit(run)/while/body/jit(paged_attention_xla)/while/cond/lt"}
}

%small (x.2: f32[4]) -> f32[4] {
  ROOT %never_seen = f32[4]{0} negate(%x.2)
}

%greedy (x.3: f32[4]) -> f32[4] {
  ROOT %greedy_copy = f32[4]{0} copy(%x.3)
}

%drawn (x.4: f32[4]) -> f32[4] {
  ROOT %sort.1 = (f32[4]{0}, /*index=1*/s32[4]{0}) sort(%x.4, %ids), dimensions={0}, to_apply=%add
}

%steps_body (t.6: (s32[], f32[4])) -> (s32[], f32[4]) {
  %qkv.1 = f32[4]{0} dot(%t.6, %t.7), metadata={op_name="jit(run)/while/body/dot_general"}
  %down.1 = f32[4]{0} fusion(%qkv.1), kind=kCustom, calls=%fused_dot, metadata={op_name="jit(run)/while/body/dot_general"}
  %nameless = f32[4]{0} fusion(%down.1), kind=kLoop, calls=%fused_copy
  %while.2 = (s32[], f32[4]{0}) while(%t.8), condition=%attention_cond, body=%attention_body, metadata={op_name="jit(run)/while/body/jit(paged_attention_xla)/while"}
  %call.1 = f32[4]{0} call(%nameless), to_apply=%small, frontend_attributes={xla_cpu_small_call="true"}
  %ffi_call.7 = (f32[4]{0}, f32[2,8]{1,0}) custom-call(%nameless), custom_call_target="jpaged_paged_attention", metadata={op_name="jit(run)/while/body/jit(paged_attention_numba)/ffi_call"}
  %topk.1 = f32[4]{0} custom-call(%nameless), custom_call_target="TopK", metadata={op_name="jit(run)/while/body/top_k"}
  ROOT %cond.1 = (f32[4]{0}) conditional(%p, %x.5, %x.6), branch_computations={%greedy, %drawn}
}

%steps_cond (t.9: (s32[], f32[4])) -> pred[] {
  ROOT %less.3 = pred[] compare(%i, %n), direction=LT, metadata={op_name="jit(run)/while/cond/lt"}
}

ENTRY %main.1 (arg.1: f32[4]) -> f32[4] {
  %copy.1 = f32[4]{0} copy(%arg.1)
  ROOT %while.1 = (s32[], f32[4]{0}) while(%copy.1), condition=%steps_cond, body=%steps_body, metadata={op_name="jit(run)/while"}
}
"""  # noqa: E501


def test_the_operations_of_a_program_by_hand():
    program = parse_program(HLO)
    assert program.module == "jit_run"
    found = {c: {name for name, category in program.category.items() if category == c} for c in CATEGORIES}
    assert found == {
        "weight_products": {"qkv.1", "down.1"},
        "attention_products": {"scores"},
        "attention_kernel": {"ffi_call.7"},
        "attention_other": {"exp.1", "window", "less", "less.2", "deep_copy", "tuple.1"},
        "other_operations": {"nameless", "call.1", "topk.1", "greedy_copy", "sort.1", "less.3", "copy.1"},
        "between": set(),
    }


def test_a_loop_body_that_is_not_attention_s_alone_is_other():
    shared = HLO.replace(
        "%copy.1 = f32[4]{0} copy(%arg.1)", "%while.9 = f32[4]{0} while(%a), condition=%inner_cond, body=%inner_body"
    )
    category = parse_program(shared).category
    assert category["deep_copy"] == category["less"] == "other_operations"
    assert category["window"] == "attention_other"


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="this is no HLO module: 'module @jit_run"):
        parse_program("module @jit_run { func.func public @main() }")


def test_the_sampled_bursts_are_spread_over_those_of_their_budget():
    budgets = [16, 16, *[4] * 12, 16, 32, 4, 4]
    assert module._choose(budgets, lambda budget: 1) == {0, 1, 14, 15, 4, 9, 13}
    # bursts of two steps each begin at 2, 4, .., 12 and 16
    assert module._choose(budgets, lambda budget: 2 if budget == 4 else 1) == {0, 1, 14, 15, 4, 8, 12}


def event(name, duration_ns, **stats):
    return SimpleNamespace(name=name, duration_ns=duration_ns, stats=stats.items())


def profile_of(**planes):
    return SimpleNamespace(
        planes=[
            SimpleNamespace(name=name, lines=[SimpleNamespace(events=list(found))]) for name, found in planes.items()
        ]
    )


def test_events_of_other_programs_and_devices_are_left_out():
    profile = profile_of(
        host_CPU=[
            event("dot.1", 2e9, hlo_op="dot.1", hlo_module="jit_run"),
            event("dot.1", 1e9, hlo_op="dot.1", hlo_module="jit__submit"),
            event("a new name for dot.1", 3e9, hlo_op="dot.1", hlo_module="jit_run"),
            event("copy.1", 4e9),
        ],
        device_GPU=[event("dot.1", 1e9)],
    )
    assert read_operations(profile, "jit_run") == {"dot.1": 5.0, "copy.1": 4.0}


def seconds(**category_s):
    return dict.fromkeys(CATEGORIES, 0.0) | category_s


def test_a_step_of_a_budget_counts_as_often_as_the_run_has_it():
    found = Breakdown(
        wall_s=10.0,
        steps_by_budget={8: 6, 16: 1},
        profiles={
            8: BudgetProfile(bursts=2, steps=4, wall_s=4.0, category_s=seconds(weight_products=3.0, between=1.0)),
            # operations side by side: more seconds than the wall has
            16: BudgetProfile(bursts=1, steps=1, wall_s=2.0, category_s=seconds(attention_products=3.0, between=-1.0)),
        },
    ).to_json()
    assert (found["wall_s"], found["profiled_wall_s"]) == (10.0, 6 * 1.0 + 2.0)
    assert found["share"] == pytest.approx(
        seconds(weight_products=4.5 / 8, attention_products=3 / 8, between=(1.5 - 1) / 8)
    )
    assert found["category_s"]["weight_products"] == pytest.approx(10 * 4.5 / 8)
    assert found["outside_products_share"] == pytest.approx(0.5 / 8)
    assert found["outside_weight_products_share"] == pytest.approx(3.5 / 8)
    assert found["steps_by_budget"] == {"8": 6, "16": 1}
    assert found["profiled_by_budget"]["8"] == {
        "bursts": 2, "steps": 4, "step_s": 1.0, "category_step_s": seconds(weight_products=0.75, between=0.25),
    }  # fmt: skip


def test_a_breakdown_that_cannot_be_made_is_refused_before_the_run(monkeypatch):
    workload = synthetic_workload(2, seed=0, token_ids=(0, 9))
    check_breakdown(workload)
    late = replace(workload.requests[1], arrival_s=0.5)
    with pytest.raises(ValueError, match=r"must arrive at 0 s; request '1' of late arrives at 0\.5 s"):
        check_breakdown(Workload("late", (workload.requests[0], late)))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match="XLA's profile of a CPU, and this is 'gpu'"):
        check_breakdown(workload)
    monkeypatch.delattr(jax.profiler, "ProfileData")
    with pytest.raises(ValueError, match=r"needs jax\.profiler\.ProfileData, which JAX .* has not"):
        check_breakdown(workload)


class ScriptEngine:
    """Runs steps of given token budgets, two to a burst at a budget of 4, whatever it is asked to run."""

    def __init__(self, budgets):
        self.budgets, self.history, self.submitted, self.aborted = budgets, [], [], False

    @property
    def has_work(self):
        return len(self.history) < len(self.budgets)

    def submit(self, request):
        self.submitted.append(request.request_id)

    def burst(self):
        if self.has_work:
            budget = self.budgets[len(self.history)]
            self.history += [SimpleNamespace(budget=budget)] * self.burst_steps(budget)
        return []

    def burst_steps(self, budget):
        return 2 if budget == 4 else 1

    def program_text(self, budget):
        return HLO

    def reset_prefix_cache(self):
        return True

    def abort_all(self):
        self.aborted = True


SCRIPT = (16, 4, 4, 4, 4, 16, 4, 4, 4, 4, 16, 4, 4, 4, 4, 4, 4)
WORKLOAD = synthetic_workload(6, seed=1, token_ids=(0, 255), prompt_tokens=(3, 12), output_tokens=(2, 10))


def break_down_script(monkeypatch, measured_budgets, operations_s=None):
    """A measured run of those budgets, repeated by an engine that runs SCRIPT; a burst takes a second a token."""

    def profiled(engine, name):
        assert name == "jit_run"
        events, budget = engine.burst(), engine.history[-1].budget
        return events, float(budget), operations_s or Counter({"qkv.1": budget / 2, "exp.1": budget / 4, "while.1": 9})

    monkeypatch.setattr(module, "_profiled_burst", profiled)
    engine = ScriptEngine(SCRIPT)
    measured = SimpleNamespace(history=[SimpleNamespace(budget=b) for b in measured_budgets], wall_s=100.0)
    try:
        return break_down(engine, WORKLOAD, measured), engine
    finally:
        assert engine.aborted


def test_each_budget_is_profiled_by_itself(monkeypatch):
    found, engine = break_down_script(monkeypatch, SCRIPT)
    assert engine.submitted == [request.request_id for request in WORKLOAD.requests]
    assert len(engine.history) == len(SCRIPT) - 2  # the last burst is not wanted
    assert found.steps_by_budget == {4: 14, 16: 3}
    assert (found.profiles[4].bursts, found.profiles[4].steps, found.profiles[4].wall_s) == (3, 6, 12.0)
    assert (found.profiles[16].bursts, found.profiles[16].steps, found.profiles[16].wall_s) == (3, 3, 48.0)
    assert found.profiled_wall_s == 14 * 2 + 3 * 16
    assert found.share == pytest.approx(seconds(weight_products=0.5, attention_other=0.25, between=0.25))


def test_another_run_than_the_measured_one_is_noticed(monkeypatch):
    with pytest.raises(ValueError, match="step 6 has a token budget of 16, it was 4"):
        break_down_script(monkeypatch, (16, *[4] * 12, 16))
    with pytest.raises(ValueError, match="step 18 has a token budget of 0, it was 16"):
        break_down_script(monkeypatch, (*SCRIPT, 16, 16, 16, 16))


def test_a_profile_that_names_nothing_known_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"of 6 bursts explains 0\.0 of 60000\.0 ms\. .* kernel_7 \(12\.0 ms\)"):
        break_down_script(monkeypatch, SCRIPT, Counter({"kernel_7": 0.002}))


def test_half_of_a_long_step_must_be_explained():
    def check(known_s, wall_s=1.0):
        spent = seconds(weight_products=known_s, between=wall_s - known_s)
        module._check_explained([BudgetProfile(bursts=1, steps=1, wall_s=wall_s, category_s=spent)], Counter())

    check(0.6)
    check(1.4)  # side by side
    check(0.001, wall_s=0.02)  # a tiny model: the host takes longer
    with pytest.raises(ValueError, match=r"explains 400\.0 of 1000\.0 ms\. .* it names nothing"):
        check(0.4)
    with pytest.raises(ValueError, match=r"explains 0\.0 of 20\.0 ms"):
        check(0.0, wall_s=0.02)


LAYERS = 1


@pytest.fixture(scope="module")
def engine():
    """A tiny Llama's. One program: it takes seconds to compile."""
    model = tiny_config(num_layers=LAYERS)
    config = EngineConfig(
        page_size=4, num_pages=40, max_num_seqs=4, max_num_batched_tokens=8, token_budgets=(8,), max_model_len=24,
        dtype="float32",
    )  # fmt: skip
    return Engine(*tiny_decoder(model), model, config)


@pytest.fixture(scope="module")
def adapter(engine):
    adapter = EngineAdapter("continuous", engine, page_size=4)
    adapter.warmup(WORKLOAD)
    return adapter


def test_all_products_of_a_compiled_step_are_found(engine):
    count = Counter(parse_program(engine.program_text(8)).category.values())
    assert count["weight_products"] == 4 * LAYERS + 1  # qkv, o, gate and up, down; the head
    assert count["attention_kernel"] == LAYERS
    assert not count["attention_products"]  # they are in the kernel
    assert count["other_operations"] > 100


def test_the_time_of_real_steps_is_broken_down(engine, adapter):
    measured, seen = adapter.run(WORKLOAD), []
    found = break_down(engine, WORKLOAD, measured, progress=seen.append)
    assert found.steps_by_budget == {8: measured.steps}
    profile = found.profiles[8]
    assert (profile.bursts, profile.steps) == (3, 3)
    assert sum(profile.category_s.values()) == pytest.approx(profile.wall_s)
    share = found.share
    assert set(share) == set(CATEGORIES)
    assert sum(share.values()) == pytest.approx(1)
    assert all(share[c] > 0 for c in ("weight_products", "attention_kernel", "other_operations", "between"))
    # given up after the last profile, and good for another run
    assert 0 < sum(seen) < WORKLOAD.output_tokens
    assert not engine.has_work
    assert adapter.run(WORKLOAD).token_ids == measured.token_ids


def test_requests_that_were_refused_are_refused_again(engine, adapter):
    workload = Workload("a long one", (*WORKLOAD.requests[:2], WorkloadRequest("long", 0.0, (1,) * 30, 2)))
    measured = adapter.run(workload)
    assert set(measured.failures) == {"long"}
    assert break_down(engine, workload, measured).steps_by_budget == {8: measured.steps}
