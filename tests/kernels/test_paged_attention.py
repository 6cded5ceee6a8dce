"""Ragged paged attention: every implementation against the specification, and the specification against numpy."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.attention import in_numpy

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention import xla
from pallas_kernels.paged_attention.api import IMPLEMENTATIONS
from pallas_kernels.paged_attention.cases import CASES, SPARE_PAGES, Case, operands

HERE = [i for i in IMPLEMENTATIONS if not i.platforms or "cpu" in i.platforms]
NAMES = [i.name for i in HERE]
HALF = jax.ShapeDtypeStruct((1, 1, 1, 1, 16), jnp.float16)


@cache
def attention(implementation: str, **static):
    """Compiled attention, without LLVM's optimizations: here only compiling takes time."""
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(lambda *a: paged_attention(*a, implementation=implementation, **static), compiler_options=options)


def _resized(page: int, ratio: int, head_dim: int) -> list[Case]:
    """The cases of that page size, with other heads."""
    names = [name for name in (f"mixed-page{page}", f"decode-page{page}") if name in CASES]
    return [replace(CASES[name], heads=2 * ratio, head_dim=head_dim) for name in names]


#: By program, the cases that it runs: they differ in their rows alone, and are padded to one shape. Page size, query
#: heads of a KV head and head size are sizes of arrays here, without code of their own, and are varied together: each
#: value of `CASES` occurs, not each combination. Kernels for GPUs run `CASES` one by one.
PROGRAMS = {
    "page4": [CASES[name] for name in ("mixed-page4", "many-short-prompts")],
    "page4-decode": [CASES[name] for name in ("decode-page4", "many-rows")],
    "page16": [CASES[name] for name in ("mixed-page16", "one-prompt", "long-chunk", "idle")],
    "page16-decode": [CASES[name] for name in ("decode-page16", "one-query", "long-decode", "more-rows-than-tokens")],
    "page256-ratio16-decode": [replace(CASES["decode-page256"], heads=32)],
} | {
    f"page{page}-ratio{ratio}-head_dim{size}": _resized(page, ratio, size)
    for page, ratio, size in ((1, 8, 256), (3, 7, 128), (24, 6, 112), (64, 4, 96), (96, 3, 80), (128, 1, 64))
} | {
    name: [CASES[name]]
    for name in (
        "mqa7", "window1-page1", "window5-page4", "window16-page16", "window33-page16", "window100-page128",
        "soft_cap-window",
    )
}  # fmt: skip


@cache
def batches(program: str) -> list[tuple]:
    """Of each case of a program: the case, the operands, and what numpy says, with the log-sum-exps."""
    cases = PROGRAMS[program]
    rows, tokens = max(len(case.rows) for case in cases), max(case.num_tokens for case in cases)
    columns, pages = max(case.max_pages for case in cases), SPARE_PAGES + max(case.pages_used for case in cases)
    found = []
    for case in cases:
        idle = ((0, 0),) * (rows - len(case.rows))
        case = replace(case, rows=case.rows + idle, padding=case.padding + tokens - case.num_tokens)
        arguments = padded(operands(case), columns, pages)
        found.append((case, arguments, in_numpy(case, *arguments, return_lse=True)))
    return found


def padded(arguments: tuple, columns: int, pages: int) -> tuple:
    """Operands with so many columns of the page table, of page 0, and pages, of poison."""
    queries, k, v, layer, table, *rest = (np.asarray(a) for a in arguments)
    table = np.pad(table, ((0, 0), (0, columns - table.shape[1])))
    poison = ((0, 0), (0, pages - k.shape[1]), *((0, 0),) * 3)
    k, v = (np.pad(a, poison, constant_values=np.nan) for a in (k, v))
    return queries, k, v, np.int32(layer), table, *rest


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_case(program, implementation):
    """Catches: an edge of a page, a tile or a chunk off by one; a head that reads another group's keys; a masked NaN
    that still spreads; padding that is not zero. Of the log-sum-exp, where there is one: a base of 2, a maximum or a
    mask left out; a number for padding."""
    with_lse = {} if implementation == "numba" else {"return_lse": True}
    for case, arguments, (expected, expected_lse) in batches(program):
        result = attention(implementation, **case.options, **with_lse)(*arguments)
        if with_lse:
            result, lse = result
            np.testing.assert_allclose(lse, expected_lse, atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(result, expected, atol=1e-5, rtol=1e-5)
        assert (np.asarray(result)[case.num_tokens - case.padding :] == 0).all()


def test_no_size_of_the_cases_is_left_out():
    """Catches: a case added for the kernels of GPUs with a size that no implementation for a CPU is asked for."""
    ours = [case for cases in PROGRAMS.values() for case in cases]

    def sizes(cases):
        return {(name, value) for case in cases for name, value in (
            ("page", case.page_size), ("ratio", case.heads // case.kv_heads), ("head_dim", case.head_dim),
            ("window", case.sliding_window), ("capped", case.soft_cap is not None),
        )}  # fmt: skip

    assert sizes(CASES.values()) <= sizes(ours) | {("page", 2)}  # for what a GPU's copies cannot take apart


@pytest.mark.parametrize(
    ("name", "walk_bytes"),
    [("long-chunk", xla.WALK_BYTES), ("long-chunk", 0), ("window100-page128", 0), ("window1-page1", 0)],
)
def test_a_walk_of_known_length_gives_the_same(name, walk_bytes, monkeypatch):
    """What a GPU without a kernel runs. Catches: a chunk after the last of a row that counts, one too few where a
    window begins in the middle of a chunk, a NaN of a page that is walked in vain."""
    monkeypatch.setattr(xla, "WALK_BYTES", walk_bytes)
    case = CASES[name]
    arguments = operands(case)
    attend = jax.jit(partial(xla.paged_attention_xla.__wrapped__, bounded=True, return_lse=True, **case.options))
    loops = str(attend.trace(*arguments).jaxpr)
    assert "while[" not in loops and "sort[" not in loops
    out, lse = attend(*arguments)
    expected, expected_lse = in_numpy(case, *arguments, return_lse=True)
    np.testing.assert_allclose(out, expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", [i.name for i in HERE if i.missing(HALF, HALF, False) is None])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_keeps_its_dtype_and_sums_in_float32(implementation, dtype):
    """Catches: a softmax or a sum over 700 keys in half precision."""
    case = CASES["long-decode"]
    arguments = operands(case, dtype=dtype)
    result = attention(implementation, **case.options)(*arguments)
    assert result.dtype == dtype
    error = np.abs(np.asarray(result, np.float64) - in_numpy(case, *arguments))
    assert error.max() < (0.01 if dtype == jnp.bfloat16 else 0.002)


ROWS, BUDGET, PAGE, PAGES = 5, 24, 4, 12


@st.composite
def ragged(draw) -> Case:
    """Rows of a fixed number within a token budget, so that one program runs them all."""
    left, rows = BUDGET, []
    for _ in range(ROWS):
        queries = draw(st.sampled_from([0, 1, 1, 2, 5, 16, 17, BUDGET]))
        queries = min(queries, left)
        left -= queries
        longest = PAGE * (PAGES - 1)
        rows.append((queries, draw(st.integers(queries, longest)) if queries else 0))
    return Case("drawn", tuple(rows), page_size=PAGE, padding=left)


@pytest.mark.parametrize("window", [None, 6])
@settings(max_examples=60)
@given(case=ragged(), seed=st.integers(0, 9))
@example(case=Case("full", ((BUDGET, 40), *((0, 0),) * 4), page_size=PAGE), seed=0)
@example(case=Case("idle", ((0, 0),) * ROWS, page_size=PAGE, padding=BUDGET), seed=0)
def test_any_ragged_batch_equals_the_specification(window, case, seed):
    """Catches: a mix of lengths for which tiles, groups or columns are counted wrongly."""
    arguments = padded(operands(case, seed), PAGES, ROWS * PAGES + SPARE_PAGES)
    static = {"scale": 0.25, "sliding_window": window, "soft_cap": None}
    results = [
        np.asarray(attention(name, **static)(*arguments))
        for name in ("reference", *(n for n in NAMES if n != "reference"))
    ]
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "numba"])
def test_a_row_does_not_depend_on_its_neighbours(implementation):
    """NU-02, at the root: the same row, alone in its place or beside others, in each place, to the last bit. In
    float32 on a CPU nothing excuses a difference."""
    page, row, rows = 4, (1, 37), 12
    expected = None
    for place in range(4):
        # None, some, and as many as the kernel for a CPU wants before it takes all heads of a row together.
        for others in ((), ((1, 90), (1, 5), (1, 61)), ((9, 50), (1, 2), (6, 6)), ((1, 8),) * (rows - 1)):
            others = (*others, *((0, 0),) * (rows - 1 - len(others)))
            beside = (*others[:place], row, *others[place:])
            case = Case("beside", beside, page_size=page, padding=21 - sum(q for q, _ in beside))
            arguments = padded(operands(case, seed=place), 24, 60)
            queries, k, v, layer, table, start, lengths = (a.copy() for a in arguments)
            rng = np.random.default_rng(7)  # the row itself is always the same
            queries[start[place]] = rng.normal(size=queries.shape[1:])
            for pool in (k, v):
                content = rng.normal(size=(row[1], *pool.shape[2:3], pool.shape[4])).astype(np.float32)
                for token in range(row[1]):
                    pool[layer, table[place, token // page], :, token % page] = content[token]
            result = attention(implementation, **case.options)(queries, k, v, layer, table, start, lengths)
            mine = np.asarray(result)[start[place]]
            expected = mine if expected is None else expected
            np.testing.assert_array_equal(mine, expected)


def compiled_attention(implementation: str, *, pages: int, max_pages: int, tokens: int, rows: int = 8):
    shape = (4, pages, 2, 16, 64)
    pool = jax.ShapeDtypeStruct(shape, jnp.float32)

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    queries = jax.ShapeDtypeStruct((tokens, 6, 64), jnp.float32)
    function = attention(implementation, scale=0.125, sliding_window=None, soft_cap=None)
    return function.lower(queries, pool, pool, 2, ints(rows, max_pages), ints(rows + 1), ints(rows)).compile()


@pytest.mark.parametrize("implementation", ["xla", "numba"])
def test_temporary_bytes_do_not_depend_on_the_pool_or_on_the_longest_request(implementation):
    """Catches: a gather of all pages of a table, a layer sliced out of the pool, scores of rows x max_model_len. With
    more tokens than rows both walks are there, over rows of one query and of several."""
    tokens = 48

    def temporary(pages, max_pages):
        compiled = compiled_attention(implementation, pages=pages, max_pages=max_pages, tokens=tokens)
        return compiled.memory_analysis().temp_size_in_bytes

    base = temporary(512, 64)
    assert temporary(1024, 64) == base
    # Of the page table, copies are allowed: 4 bytes a page. What the pages hold is 16 KiB each.
    assert temporary(512, 256) - base <= 16 * 4 * (8 + tokens) * (256 - 64)
    assert base < 16 * 1024 * tokens * 8


@pytest.mark.parametrize("implementation", NAMES)
def test_soft_cap_bends_scores_and_the_mask_comes_after(implementation):
    """NU-04: with a cap of 50, scores of 100 and 10 become 48.2014 and 9.8688, read back from two weights; a key
    that is masked keeps weight 0 (masking before the cap would give it exp(-50))."""
    queries = jnp.full((2, 1, 16), 1.0)
    k = np.zeros((1, 2, 1, 4, 16), np.float32)
    k[0, 1, 0, :, 0] = [100.0, 10.0, 90.0, 0.0]
    v = np.zeros_like(k)
    v[0, 1, 0, :, :4] = np.eye(4)
    table, start, lengths = (jnp.asarray(a, jnp.int32) for a in ([[1]], [0, 2], [3]))
    out = attention(implementation, scale=1.0, sliding_window=None, soft_cap=50.0)(
        queries, jnp.asarray(k), jnp.asarray(v), 0, table, start, lengths
    )
    weights = np.asarray(out, np.float64)[:, 0, :4]
    capped = 50 * np.tanh(np.array([100, 10, 90]) / 50)
    np.testing.assert_allclose(capped[:2], [48.2014, 9.8688], atol=1e-4)
    np.testing.assert_allclose(np.log(weights[0, 0] / weights[0, 1]), 48.2014 - 9.8688, atol=1e-3)
    assert weights[0, 2] == weights[0, 3] == weights[1, 3] == 0
    np.testing.assert_allclose(weights[1, :3], np.exp(capped) / np.exp(capped).sum(), rtol=1e-5, atol=1e-12)


def test_shapes_that_do_not_belong_together_are_named():
    """Catches: JAX broadcasting or clamping what should have been refused."""
    queries, k, v, layer, table, start, lengths = operands(CASES["one-prompt"])

    def refused(words, q=queries, k=k, v=v, table=table, start=start, **changes):
        with pytest.raises(ValueError, match=words):
            paged_attention(q, k, v, layer, table, start, lengths, **({"scale": 1.0} | changes))

    refused(r"queries must be \[tokens, heads, head_dim\]", q=queries[0])
    refused("of one dtype", v=v.astype(jnp.bfloat16))
    refused("of one dtype", k=k[:, :1])
    refused(r"head_dim of queries \(8\) and of pages \(16\)", q=queries[..., :8])
    refused("3 query heads cannot share 2 KV heads", q=queries[:, :3])
    refused("page_table", table=table[0])
    refused("query_start", start=start[:1])
    refused("sliding_window must be at least 1", sliding_window=0)
    refused("soft_cap must be positive", soft_cap=0.0)
    refused("no implementation 'cuddly'", implementation="cuddly")


def test_what_numba_cannot_compute_is_said():
    """JX-06. Catches: half precision read as float32, a head that is no whole number of vectors."""
    arguments = operands(CASES["one-prompt"], dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="'numba' cannot, for it computes in float32, and queries are bfloat16"):
        paged_attention(*arguments, scale=1.0, implementation="numba")
    with pytest.raises(ValueError, match="'numba' cannot, for it does not return the log-sum-exp"):
        paged_attention(*operands(CASES["one-prompt"]), scale=1.0, implementation="numba", return_lse=True)
    narrow = operands(Case("narrow", ((3, 3),), head_dim=8))
    with pytest.raises(ValueError, match="'numba' cannot, for head_dim must be a multiple of 16, and is 8"):
        paged_attention(*narrow, scale=1.0, implementation="numba")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_auto_takes_numba_where_it_can(dtype):
    """Catches: the faster kernel left out of what everybody runs."""
    arguments = operands(CASES["one-prompt"], dtype=dtype)
    text = attention("auto", scale=1.0).lower(*arguments).as_text()
    assert ("jpaged_paged_attention" in text) == (dtype == jnp.float32)


def test_calls_from_many_threads_do_not_wait_for_each_other():
    """Catches: calls that hold XLA's threads until their helpers have come, who wait for a thread; memory or counters
    that two calls share; a helper that comes when all is done."""
    case = CASES["many-short-prompts"]
    arguments = operands(case)
    function = attention("numba", **case.options)
    expected = np.asarray(function(*arguments))
    with ThreadPoolExecutor(8) as threads:
        for result in threads.map(lambda _: np.asarray(function(*arguments)), range(400)):
            np.testing.assert_array_equal(result, expected)


def test_it_runs_under_vmap_and_on_a_thread_alone():
    """Catches: a call that needs a second thread; one that cannot be batched by those who compare pools."""
    case = CASES["long-chunk"]
    queries, k, v, layer, *rest = operands(case)
    function = attention("numba", **case.options)
    two = jax.vmap(lambda q: function(q, k, v, layer, *rest))(jnp.stack([queries, 2 * queries]))
    np.testing.assert_array_equal(two[0], function(queries, k, v, layer, *rest))
    np.testing.assert_array_equal(two[1], function(2 * queries, k, v, layer, *rest))
    program = (
        "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); sys.path[:0] = sys.argv[2:]\n"
        "import numpy as np\n"
        "from pallas_kernels import paged_attention\n"
        "from pallas_kernels.paged_attention.cases import CASES, operands\n"
        "case = CASES['long-chunk']\n"
        "np.save(sys.argv[1], paged_attention(*operands(case), implementation='numba', **case.options))\n"
    )
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-c", program, f"{folder}/out.npy", str(Path(__file__).parents[2])]
        subprocess.run(command, check=True)
        np.testing.assert_array_equal(np.load(f"{folder}/out.npy"), function(queries, k, v, layer, *rest))
