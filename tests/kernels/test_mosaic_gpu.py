"""The kernel for NVIDIA GPUs, run on a CPU by Pallas's interpreter, which has its threads, barriers and memories.

In float32, so that a key left out or counted twice cannot pass for rounding; with the interpreter's race detection;
and with NaN and infinities wherever no live token lies. Needs JAX 0.11 for Hopper and 0.12 for Ampere and Blackwell;
`.ci/run` has environments with them. What is interpreted of the Ampere kernel says `test_ampere.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from support.attention import in_numpy

from pallas_kernels.cards import CARDS, card_of
from pallas_kernels.paged_attention import mosaic_gpu
from pallas_kernels.paged_attention.cases import CASES, Case, operands
from pallas_kernels.paged_attention.mosaic_gpu import (
    NEEDS_JAX,
    card_for,
    paged_attention_mosaic_gpu,
    unsupported,
)
from pallas_kernels.paged_attention.tuning import Tuning


def on_cards(*names: str):
    """Runs the test for cards of so many cores that each of them goes through several parts, as on a real one."""

    def of(name: str):
        needed = NEEDS_JAX[CARDS[name].architecture]
        reason = f"needs JAX {needed[0]}.{needed[1]}, this is {jax.__version__}; .ci/run has environments with it"
        old = pytest.mark.skipif(jax.__version_info__ < needed, reason=reason)
        return pytest.param(replace(CARDS[name], cores=3), id=name, marks=old)

    return pytest.mark.parametrize("card", [of(name) for name in names])


def run(case: Case, arguments, card, *, tuning=None, return_lse=False):
    """The kernel in the interpreter; raises where two threads race."""
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    try:
        result = paged_attention_mosaic_gpu(
            *arguments,
            card=card,
            tuning=tuning,
            return_lse=return_lse,
            **case.options,
            interpret=plgpu.InterpretGPUParams(detect_races=True),
        )
        result = jax.tree.map(np.asarray, result)
        assert not interpret_pallas_call.get_races().races_found
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
    return result


# The interpreter multiplies in numpy, which warns of the poison.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")


@on_cards("a100", "h100", "b200")
@pytest.mark.parametrize("name", CASES)
def test_every_case(name, card):
    """Catches: a page, a stage or a part that is not waited for, or is overwritten; a block, a column or a head off by
    one; the poison of a masked key; padding that is not zero."""
    case = CASES[name]
    needed = NEEDS_JAX[card_for(card, case.page_size, case.head_dim).architecture]
    if jax.__version_info__ < needed:
        pytest.skip(f"copies rows as on Ampere, which needs JAX {needed}; .ci/run has an environment with it")
    arguments = operands(case)
    out, lse = run(case, arguments, card, return_lse=True)
    expected, expected_lse = in_numpy(case, *arguments, return_lse=True)
    np.testing.assert_allclose(out, expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5, rtol=1e-5)
    assert (out[case.num_tokens - case.padding :] == 0).all()


@on_cards("a100", "h100", "b200")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["decode-page16", "mixed-page64", "head_dim256", "soft_cap-window", "long-chunk"])
def test_half_precision_is_near_float64(name, dtype, card):
    """Catches: a softmax or an accumulator in half precision."""
    case = CASES[name]
    arguments = operands(case, dtype=dtype)
    out = run(case, arguments, card)
    assert out.dtype == dtype
    expected = in_numpy(case, *arguments)
    error = np.linalg.norm(out.astype(np.float64) - expected) / np.linalg.norm(expected)
    assert error < (1e-2 if dtype == jnp.bfloat16 else 2e-3)


ROWS, TOKENS, PAGE, PAGES = 4, 20, 8, 26


@st.composite
def ragged(draw) -> Case:
    """Rows of a fixed number within a token budget: one program runs them all."""
    left, rows = TOKENS, []
    for _ in range(ROWS):
        queries = min(left, draw(st.sampled_from([0, 1, 1, 2, 5, 17, TOKENS])))
        left -= queries
        longest = PAGE * (PAGES - 1)
        rows.append((queries, draw(st.integers(queries, longest)) if queries else 0))
    return Case("drawn", tuple(rows), head_dim=64, page_size=PAGE, padding=left)


@on_cards("a100", "h100", "b200")
@pytest.mark.parametrize("window", [None, 9])
@settings(max_examples=12)
@given(case=ragged(), seed=st.integers(0, 9))
@example(case=Case("idle", ((0, 0),) * ROWS, head_dim=64, page_size=PAGE, padding=TOKENS), seed=0)
@example(case=Case("cut", ((1, 200), *((1, 3),) * (ROWS - 1)), head_dim=64, page_size=PAGE, padding=16), seed=0)
def test_any_ragged_batch(window, card, case, seed):
    """Catches: a mix of lengths for which parts or blocks are counted wrongly, or a barrier is a phase behind."""
    case = replace(case, sliding_window=window)
    queries, k, v, layer, table, start, lengths = operands(case, seed)
    table = jnp.pad(table, ((0, 0), (0, PAGES - table.shape[1])))
    k, v = (
        jnp.pad(a, ((0, 0), (0, ROWS * PAGES + 3 - a.shape[1]), *((0, 0),) * 3), constant_values=np.nan) for a in (k, v)
    )
    arguments = (queries, k, v, layer, table, start, lengths)
    np.testing.assert_allclose(run(case, arguments, card), in_numpy(case, *arguments), atol=1e-5, rtol=1e-5)


@on_cards("a100", "h100", "b200")
@pytest.mark.parametrize(
    "tuning", [Tuning(1, 64, 2, 1, 2), Tuning(2, 64, 3, 2, 0), Tuning(1, 128, 2, 2, 9), Tuning(2, 128, 2, 1, 1)]
)
def test_tuning_changes_no_result(tuning, card):
    """Catches: a stage or a part that only the default sizes have."""
    case = Case("tuned", ((1, 300), (19, 150), (0, 0), (1, 1)), head_dim=64)
    arguments = operands(case)
    if tuning.tiles > 1 and card.name == "a100":
        with pytest.raises(ValueError, match="has 2 tiles side by side; on a100 there can be one"):
            run(case, arguments, card, tuning=tuning)
        return
    expected = in_numpy(case, *arguments)
    np.testing.assert_allclose(run(case, arguments, card, tuning=tuning), expected, atol=1e-5, rtol=1e-5)


@on_cards("a100", "h100", "b200")
@pytest.mark.parametrize("poisoned", [0, 1], ids=["values", "keys"])
@pytest.mark.parametrize("page", [3, 17])
def test_a_request_that_has_turned_nan_is_alone_with_it(page, poisoned, card):
    """Invariant 7, with contexts that are cut into parts. Catches: parts that are merged by a product with zeros."""
    case = Case("sick", ((1, 300), (1, 290), (1, 20), (0, 0)), heads=2, kv_heads=1)
    queries, k, v, layer, table, start, lengths = operands(case)
    sick, pools = 1, [v, k]
    pools[poisoned] = pools[poisoned].at[layer, table[sick, page]].set(jnp.nan)
    v, k = pools
    arguments = (queries, k, v, layer, table, start, lengths)
    out, lse = run(case, arguments, card, return_lse=True)
    expected, expected_lse = in_numpy(case, *arguments, return_lse=True)
    assert np.isnan(out[sick]).all()
    healthy = [row for row in range(3) if row != sick]
    np.testing.assert_allclose(out[healthy], expected[healthy], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(lse[healthy], expected_lse[healthy], atol=1e-5, rtol=1e-5)


def test_what_there_is_no_kernel_for_is_said():
    """JX-05. Catches: a lowering trace in place of a sentence."""

    def said(heads=8, kv_heads=2, head_dim=64, page=16, dtype=jnp.bfloat16, pages_dtype=None):
        pages = jax.ShapeDtypeStruct((1, 4, kv_heads, page, head_dim), pages_dtype or dtype)
        return unsupported(jax.ShapeDtypeStruct((3, heads, head_dim), dtype), pages)

    assert said() is None
    assert said(dtype=jnp.float32) == "queries are float32 and pages float32; both must be bfloat16, or both float16"
    assert said(pages_dtype=jnp.float16).startswith("queries are bfloat16 and pages float16")
    assert said(head_dim=72) == "head_dim is 72; it must be a multiple of 16 up to 128, or of 32 up to 256"
    assert said(head_dim=16) is None and said(head_dim=144) and said(head_dim=320) and said(head_dim=256) is None
    assert said(heads=256) == "128 query heads share a KV head; at most 64 can"
    assert all(said(page=page, head_dim=d) is None for page in range(1, 257) for d in (64, 80, 96, 112, 128, 256))


def test_each_card_has_a_kernel_for_every_case_or_says_which_jax_it_needs(monkeypatch):
    """JX-05. Catches: a case that a card skips; pages that the TMA unit cannot take apart, given to it."""

    def said(card, version, page=16, head_dim=64):
        monkeypatch.setattr(mosaic_gpu, "target_card", lambda: CARDS[card])
        monkeypatch.setattr(jax, "__version_info__", version)
        pages = jax.ShapeDtypeStruct((1, 4, 2, page, head_dim), jnp.bfloat16)
        return mosaic_gpu.missing(jax.ShapeDtypeStruct((3, 8, head_dim), jnp.bfloat16), pages)

    for case in CASES.values():
        assert all(said(card, (0, 12, 0), case.page_size, case.head_dim) is None for card in CARDS), case.name
    here = jax.__version__
    assert said("h200", (0, 11, 2)) is None and said("h200", (0, 11, 2), 3, 128) is None
    assert said("h200", (0, 10, 2)) == f"on h200 it needs JAX 0.11, and this is {here}"
    assert said("b200", (0, 11, 2)) == f"on b200 it needs JAX 0.12, and this is {here}"
    assert said("h200", (0, 11, 2), 2, 96) is None and said("h200", (0, 11, 2), 4, 80) is None
    by_rows = "on h200 with pages of 3 tokens and head_dim 96 it needs JAX 0.12"
    assert said("h200", (0, 11, 2), 3, 96) == f"{by_rows}, and this is {here}"
    assert said("h200", (0, 12, 0), 3, 96) is None and said("b200", (0, 12, 0), 1, 80) is None


def test_a_card_is_known_by_what_jax_calls_it():
    """Catches: an H200 taken for an H20, a consumer card taken for a server's."""
    assert card_of("NVIDIA H100 80GB HBM3") is CARDS["h100"]
    assert card_of("NVIDIA GH200 480GB") is CARDS["h200"]
    assert card_of("NVIDIA A100-SXM4-80GB") is CARDS["a100"]
    assert card_of("NVIDIA B200") is CARDS["b200"]
    assert card_of("NVIDIA H20") is card_of("NVIDIA GeForce RTX 4090") is card_of("cpu") is None


@on_cards("a100", "h100", "b200")
def test_it_composes_with_scan_over_layers_and_jit(card):
    """Catches: a layer that is read at trace time; a kernel that only runs alone."""
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    case = Case("layers", ((1, 70), (9, 20), (0, 0)), head_dim=16)
    queries, k, v, layer, *batch = operands(case)
    k, v = (jnp.stack([a[layer], a[layer] / 2]) for a in (k, v))
    attend = partial(
        paged_attention_mosaic_gpu, card=card, interpret=plgpu.InterpretGPUParams(detect_races=True), **case.options
    )

    @jax.jit
    def model(queries, k, v, batch):
        return jax.lax.scan(lambda x, n: (attend(x, k, v, n, *batch),) * 2, queries, jnp.arange(2, dtype=jnp.int32))[1]

    try:
        outs = np.asarray(model(queries, k, v, batch))
        assert not interpret_pallas_call.get_races().races_found
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
    expected = queries
    for number, out in enumerate(outs):
        expected = in_numpy(case, expected, k, v, number, *batch)
        np.testing.assert_allclose(out, expected, atol=1e-5, rtol=1e-5)


@on_cards("a100", "h100", "b200")
def test_it_composes_with_shard_map_over_kv_heads(card):
    """Each share of the KV heads under `shard_map`, one after the other: the interpreter has one memory for all devices
    of a process. Eight cards are compiled for in `tests/gpu/aot_step.py`. Catches: a kernel that counts the heads of
    the whole, or cannot be traced in there."""
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    case = Case("split", ((1, 70), (9, 20), (0, 0)))
    queries, k, v, layer, *batch = operands(case)
    attend = partial(paged_attention_mosaic_gpu, card=card, interpret=plgpu.InterpretGPUParams(), **case.options)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    heads, pages, whole = PartitionSpec(None, "tensor"), PartitionSpec(None, None, "tensor"), PartitionSpec()
    split = jax.jit(
        jax.shard_map(
            lambda queries, k, v, *batch: attend(queries, k, v, layer, *batch),
            mesh=mesh,
            in_specs=(heads, pages, pages, whole, whole, whole),
            out_specs=heads,
            check_vma=False,
        )
    )
    group = case.heads // case.kv_heads
    try:
        outs = [
            np.asarray(split(queries[:, h * group : (h + 1) * group], k[:, :, h : h + 1], v[:, :, h : h + 1], *batch))
            for h in range(case.kv_heads)
        ]
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
    expected = in_numpy(case, queries, k, v, layer, *batch)
    np.testing.assert_allclose(np.concatenate(outs, axis=1), expected, atol=1e-5, rtol=1e-5)
