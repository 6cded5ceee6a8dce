"""What the compiled step may cost, read from the compiled program: memory in place, no host in the loop, one trace."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.drive import Ask, compiled, jit_submit, submission
from support.record import recorded
from support.shapes import LLAMA_8B, LLAMA_70B
from support.stubs import STUB_SHAPE, HistoryDecoder, Traces
from support.tiny import TINY, tiny_decoder

from jpaged.bench.hlo import report
from jpaged.bench.scheduling import Sizes
from jpaged.config import EngineConfig
from jpaged.pool import CHUNK_PAGES, KVPool
from jpaged.runtime.host_pool import read_pages, write_pages
from jpaged.step import EngineState, abort, demand, exchange, make_state, run, step, submit

SHAPE = {"layers": TINY.num_layers, "kv_heads": TINY.num_kv_heads, "head_dim": TINY.head_dim}
PAGES, ROWS = 8192, 8
#: What is counted is made by XLA; LLVM's optimizations come after it and cost half of the time.
QUICKLY = {"xla_backend_optimization_level": 0}


@cache
def compile_tiny(*, budget: int, steps: int | None, pages: int, dtype: str = "float32", trace=False):
    decoder, params = tiny_decoder(TINY)
    config = EngineConfig(
        max_queue=64,
        page_size=16,
        num_pages=pages,
        max_num_seqs=ROWS,
        max_num_batched_tokens=budget,
        max_model_len=512,
        trace=trace,
    )
    state = jax.eval_shape(lambda: make_state(config, **SHAPE, dtype=jnp.dtype(dtype)))

    def function(params, state):
        if steps is None:
            return step(decoder, params, state, budget=budget)
        return run(decoder, params, state, budget=budget, steps=steps)

    program = jax.jit(function, donate_argnums=1).lower(params, state).compile(QUICKLY)
    pool = state.pool
    return report(program, pool.k.shape), sum(a.size * a.dtype.itemsize for a in (pool.k, pool.v))


@pytest.mark.parametrize(("dtype", "budget", "steps"), [("float32", 8, None), ("float32", 64, 4), ("float16", 64, 4)])
def test_on_a_cpu_the_pool_is_updated_in_place(dtype, budget, steps, record_property):
    """Decoding only, and a burst of mixed steps. Catches: a pool that is copied (by a scatter after a gather, a scan
    that cannot alias, a layer sliced out, a kernel that XLA makes a copy for), a temporary that grows with the pool, a
    loop or a branch in the scheduler that would stop a GPU. In float32 attention is a kernel, in float16 operations of
    XLA."""
    counts, pool_bytes = compile_tiny(budget=budget, steps=steps, pages=PAGES, dtype=dtype)
    record_property(f"cpu {dtype} budget {budget} steps {steps}", json.dumps(counts))
    assert counts["aliased_bytes"] >= pool_bytes
    assert counts["pool_copies"] == 0
    assert counts["temporary_bytes"] < 128 * 1024 + budget * 16 * 1024 < pool_bytes / 16
    assert counts["conditionals"] == 2  # the sampler's: random numbers, sorting the vocabulary
    # XLA's attention walks over pages, group after group, for rows of one query and for rows of several.
    groups = [] if dtype == "float32" else [4] if budget <= ROWS else [4, 3]
    outside = [] if steps is None else [steps]
    walks = [[*outside, count] for count in groups] * TINY.num_layers
    assert sorted(counts["unknown_loops"]) == sorted(walks)


def test_a_trace_costs_lists_and_nothing_else_and_nothing_grows_with_the_pool():
    """Catches: decisions that keep an older pool alive, or that are found by a loop or a branch; a temporary that is
    small here because the pool is, such as one layer of it. Of a step without a trace and with half the pages, which
    the test before has compiled, it differs by lists."""
    plain, plain_bytes = compile_tiny(budget=8, steps=None, pages=PAGES)
    counts, pool_bytes = compile_tiny(budget=8, steps=None, pages=2 * PAGES, trace=True)
    assert counts["aliased_bytes"] >= pool_bytes
    assert counts["pool_copies"] == 0 and counts["conditionals"] == 2 and counts["unknown_loops"] == []
    assert counts["temporary_bytes"] < 128 * 1024 + 64 * 16 * 1024 < pool_bytes / 16
    # What grows with the number of pages is their reference counts, not what they hold.
    grown = abs(counts["temporary_bytes"] - plain["temporary_bytes"])
    assert grown <= 64 * PAGES < (pool_bytes - plain_bytes) / 100


def with_host_pool(sizes: Sizes) -> Callable[[], EngineState]:
    return partial(sizes.state, swap_space_bytes=1 << 18)


def check_scheduling(small: dict, large: dict) -> None:
    """That the compiled step without a model, `demand` and `exchange` have two conditionals (the sampler's) in all,
    loops of known length alone and no copy of the pool, and are the same but for their sizes. `large` has 256 slots and
    30,000 pages: the bits of who holds which are the largest thing that may be copied."""
    for program, conditionals in (("step", 2), ("demand", 0), ("exchange", 0)):
        for counts in (small[program], large[program]):
            assert counts["conditionals"] == conditionals, program
            assert counts["unknown_loops"] == [], program
            assert counts["pool_copies"] == 0, program
        assert small[program]["known_loops"] == large[program]["known_loops"], program
        assert large[program]["largest_copy_bytes"] <= 4 * 8 * 30_001, program


def test_the_scheduler_alone_is_the_same_program_at_any_size(record_property):
    """Catches: a branch or a loop in the scheduler that depends on what it schedules, or that XLA makes only where
    there are many slots, a long queue or a large pool; a copy of the pool that the decoder's own writes would hide."""
    found = []
    for sizes in (Sizes(4, 8, 40, max_model_len=128), Sizes(256, 4096, 30_000)):
        state = jax.eval_shape(sizes.state)
        programs = {
            "step": jax.jit(sizes.step, donate_argnums=0).lower(state).compile(QUICKLY),
            "demand": jax.jit(lambda state: demand(state)).lower(state).compile(QUICKLY),
            "exchange": jax.jit(exchange, donate_argnums=0)
            .lower(jax.eval_shape(with_host_pool(sizes)), 8)
            .compile(QUICKLY),
        }
        found.append({name: report(program, state.pool.k.shape) for name, program in programs.items()})
        record_property(f"cpu scheduling {sizes}", json.dumps(found[-1]))
    check_scheduling(*found)


def operations(jaxpr: Any, least: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What makes an array of `least` elements at least: the operation, and the shape of its second operand."""
    for equation in jaxpr.eqns:
        inner = [sub for value in equation.params.values() for sub in (value if isinstance(value, tuple) else [value])]
        inner = [getattr(sub, "jaxpr", sub) for sub in inner if hasattr(sub, "jaxpr") or hasattr(sub, "eqns")]
        for sub in inner:
            yield from operations(sub, least)
        if not inner and any(out.aval.size >= least for out in equation.outvars):
            yield equation.primitive.name, equation.invars[1].aval.shape if len(equation.invars) > 1 else ()


def test_longer_requests_cost_no_pass_over_all_tables(record_property):
    """With requests of 131,072 tokens, the page tables of 64 slots are written a few entries at a time, in place; the
    one pass over them makes the batch of the forward pass. Catches: tables that are cleared, compared, scattered or
    gathered whole, which took 4 of 5 ms of a step."""
    sizes = Sizes(64, 64, 30_000, 131_072)
    state = jax.eval_shape(sizes.state)
    table = state.slots.page_table.size
    for name, function in (("step", sizes.step), ("demand", demand)):
        seen = list(operations(jax.make_jaxpr(function)(state).jaxpr, table))
        written = [entries for kind, entries in seen if kind.startswith("scatter")]
        assert written and max(entries[0] for entries in written) <= 131_072 // 16, name
        others = [kind for kind, _ in seen if not kind.startswith("scatter")]
        of_the_batch = ["broadcast_in_dim", "gather", "lt", "select_n"]
        assert sorted(others) == (of_the_batch if name == "step" else []), name
    counts = report(jax.jit(sizes.step, donate_argnums=0).lower(state).compile(), state.pool.k.shape)
    record_property(f"cpu scheduling {sizes}", json.dumps(counts))
    assert counts["largest_copy_bytes"] <= 4 * table


def test_submit_and_abort_are_in_place_and_without_loops():
    """Catches: a pool that is copied because the host only added a request."""
    config = EngineConfig(
        max_queue=64, max_num_batched_tokens=256, page_size=16, num_pages=PAGES, max_num_seqs=ROWS, max_model_len=512
    )
    state = jax.eval_shape(lambda: make_state(config, **SHAPE))
    pool_bytes = 2 * state.pool.k.size * 4
    batch = submission(config, [Ask(1, [1], 2)])
    for function, argument in ((submit, batch), (abort, jnp.zeros(4, jnp.int32))):
        program = jax.jit(function, donate_argnums=0).lower(state, argument).compile()
        counts = report(program, state.pool.k.shape)
        assert counts["aliased_bytes"] >= pool_bytes
        assert counts["temporary_bytes"] < pool_bytes / 100
        assert counts["conditionals"] == 0 and counts["unknown_loops"] == []


def test_pages_come_from_the_host_in_place():
    """Catches: a pool that is copied because some of its pages are written."""
    config = EngineConfig(
        max_queue=64, max_num_batched_tokens=256, page_size=16, num_pages=PAGES, max_num_seqs=ROWS, max_model_len=512
    )
    pool = jax.eval_shape(lambda: make_state(config, **SHAPE).pool)
    pages = jax.ShapeDtypeStruct((CHUNK_PAGES,), jnp.int32)
    chunk = jax.eval_shape(KVPool.read, pool, pages)
    counts = report(write_pages.lower(pool, pages, chunk).compile(), pool.k.shape)
    pool_bytes = 2 * pool.k.size * 4
    assert counts["aliased_bytes"] >= pool_bytes and counts["pool_copies"] == 0 == counts["conditionals"]
    assert counts["temporary_bytes"] < pool_bytes / 100
    counts = report(read_pages.lower(pool, pages).compile(), pool.k.shape)
    assert counts["pool_copies"] == 0 and counts["temporary_bytes"] < pool_bytes / 100


def test_the_step_is_traced_once_whatever_the_mix():
    """JX-01: 300 mixes of requests (lengths, sampling parameters, aborts, none at all) within a limit that is no power
    of two are one program. Catches: an optional field, a Python int or a weak type that changes between calls."""
    decoder = HistoryDecoder(traces=Traces())
    config = EngineConfig(
        page_size=16, num_pages=64, max_num_seqs=4, max_queue=4, max_num_batched_tokens=317, max_model_len=330
    )
    one, several = compiled(decoder, 317), compiled(decoder, 317, 2)
    # Of its own: what `jax.jit` makes of one function twice is one cache, and another test may have used it.
    give_up = jax.jit(lambda state, uids: abort(state, uids), donate_argnums=0)
    rng = np.random.default_rng(0)
    state = make_state(config, **STUB_SHAPE)
    for mix in range(300):
        if int(np.sum(np.asarray(state.requests.status) == 0)) >= 2 and mix % 3:
            length = int(rng.integers(1, 318))
            ask = Ask(
                mix + 1, rng.integers(0, 31, length).tolist(), max_len=int(rng.integers(length + 1, length + 8)),
                temperature=float(rng.choice([0, 0.7])), top_k=int(rng.integers(0, 3)),
                stop_ids=rng.integers(0, 31, rng.integers(0, 3)).tolist(),
            )  # fmt: skip
            state = jit_submit(state, submission(config, [ask], 2))
        if mix % 7 == 0:
            state = give_up(state, np.array([rng.integers(1, mix + 2)], np.int32))
        state = several(None, state)[0] if mix % 5 == 0 else one(None, state)
    assert decoder.traces.count == 2  # `step`, and the body of `run`
    assert one._cache_size() == several._cache_size() == give_up._cache_size() == 1


def test_shapes_and_dtypes_of_the_state_never_change():
    """Catches: a counter that becomes int64 under x64, a weakly typed field: the next call would be another program."""
    config = EngineConfig(
        max_queue=64, page_size=4, num_pages=40, max_num_seqs=4, max_num_batched_tokens=24, max_model_len=40
    )
    for x64 in (False, True):
        with jax.enable_x64(x64):
            decoder, params = tiny_decoder()
            before = jax.eval_shape(lambda: make_state(config, **SHAPE))
            after = {
                "submit": jax.eval_shape(submit, before, submission(config, [Ask(1, [1], 5)])),
                "abort": jax.eval_shape(abort, before, jnp.zeros(2, jnp.int32)),
                "step": jax.eval_shape(lambda p, s, d=decoder: step(d, p, s, budget=24), params, before),
                "run": jax.eval_shape(lambda p, s, d=decoder: run(d, p, s, budget=3, steps=2)[0], params, before),
            }
            for name, state in after.items():
                same = jax.tree.map(
                    lambda a, b: (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type), before, state
                )
                wrong = [jax.tree_util.keystr(p) for p, ok in jax.tree_util.tree_leaves_with_path(same) if not ok]
                assert wrong == [], f"{name}, x64={x64}"


# The same for a GPU


@pytest.fixture(scope="session")
def cuda_plugin(request) -> Path | None:
    """A folder with XLA's CUDA plugin of this JAX version, kept in pytest's cache. It stands apart from the tests'
    environment, where JAX would find it and complain that there is no GPU. None: it is installed anyway."""
    if importlib.util.find_spec("jax_cuda12_plugin"):
        return None
    version = importlib.metadata.version("jax")
    place = request.config.cache.mkdir("cuda-plugin") / version
    if not place.exists():
        wheels = [f"jax-cuda12-plugin=={version}", f"jax-cuda12-pjrt=={version}"]
        wheels += ["nvidia-cuda-nvcc-cu12", "nvidia-cuda-runtime-cu12"]
        unfinished = place.with_suffix(f".{os.getpid()}")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(unfinished), *wheels]
        subprocess.run(pip, check=True)
        unfinished.rename(place)
    return place


KERNELS = jax.__version_info__ >= (0, 11)
#: Layers of the models of which two are compiled.
WHOLE_LAYERS = {"llama-8b-2": LLAMA_8B.num_layers, "llama-70b-2": LLAMA_70B.num_layers}
STEP_SCRIPT = Path(__file__).parents[1] / "gpu" / "aot_step.py"


def compiled_for_h200s(name: str, cuda_plugin: Path | None) -> list[dict]:
    """What `tests/gpu/aot_step.py` found of the programs `name`."""
    path = os.pathsep.join([*([str(cuda_plugin)] if cuda_plugin else []), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, str(STEP_SCRIPT), name], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_on_an_h200_the_scheduler_alone_asks_nothing_of_the_host(cuda_plugin, record_property):
    """The same for a GPU, where each loop of unknown length and each conditional is a round trip to the host. With an
    older JAX it would cost minutes of a suite that may take twelve; tests/gpu/check.sh runs it with JAX 0.12."""
    if not KERNELS:
        pytest.skip(f"tests/gpu/check.sh compiles this with JAX 0.12, and this is {jax.__version__}")
    found = compiled_for_h200s("scheduling", cuda_plugin)
    [counts] = found
    name = f"h200 scheduling {counts['slots']} slots, {counts['queued']} queued, {counts['pages']} pages"
    record_property(name, json.dumps(counts))
    assert counts["step"]["known_loops"] == counts["demand"]["known_loops"] == counts["exchange"]["known_loops"] == []
    check_scheduling(counts, counts)


@pytest.mark.parametrize(
    "model",
    [
        "llama-8b-2",
        "llama-70b-2",
        *(pytest.param(m, marks=pytest.mark.whole) for m in ("llama-8b", "qwen-0.5b", "llama-70b")),
    ],
)
def test_on_h200s_nothing_grows_with_the_pool(model, cuda_plugin, record_property):
    """The same for GPUs, from programs compiled without one; Llama 3.1 70B is split over eight. Catches what a CPU does
    not show: a pool copied into a kernel's layout, weights copied before they are used, a branch or loop that became a
    round trip to the host, a sort's scratch memory, a collective too many."""
    if not KERNELS:
        pytest.skip(f"the kernels need JAX 0.11 and this is {jax.__version__}; tests/gpu/check.sh has it")
    programs = compiled_for_h200s(model, cuda_plugin)
    for counts in programs:
        record_property(f"h200 {model} budget {counts['budget']} steps {counts['steps']}", json.dumps(counts))
    for counts in programs:
        assert counts["aliased_bytes"] >= counts["pool_bytes"]
        assert counts["pool_copies"] == 0
        # Some arrays of rows x vocabulary for the sampler, and per token of the budget what a layer holds.
        bound = 7 * counts["logits_bytes"] + counts["budget"] * 512 * 1024
        # Of two layers of a model the pool is small, and the bound is not: it is little beside the whole model's pool.
        all_layers = WHOLE_LAYERS.get(model, counts["layers"])
        assert counts["temporary_bytes"] < bound < all_layers * counts["pool_bytes"] / counts["layers"] / 20
        assert counts["conditionals"] == 2
        burst = [] if counts["steps"] is None else [counts["steps"]]
        assert counts["known_loops"] == burst
        assert counts["unknown_loops"] == []
        assert counts["attention_kernels"] == counts["layers"]
        assert counts["all_reduces"] == (2 * counts["layers"] if counts["cards"] > 1 else 0)
    before = [counts for counts in recorded(STEP_SCRIPT.with_name("step.json")) if counts["model"] == model]
    for now, then in zip(programs, before, strict=before != []):
        message = f"temporaries were {then['temporary_bytes']}; if that is meant, run {STEP_SCRIPT} --write"
        assert now["temporary_bytes"] <= 1.01 * then["temporary_bytes"], message
    if model.startswith("llama-8b"):
        full, half, _ = programs
        grown = abs(full["temporary_bytes"] - half["temporary_bytes"])
        pages, layer_bytes = full["pages"] - half["pages"], (full["pool_bytes"] - half["pool_bytes"]) / full["layers"]
        assert grown <= 1024 * pages < WHOLE_LAYERS.get(model, full["layers"]) * layer_bytes / 1000
