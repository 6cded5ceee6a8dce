"""The kernel for NVIDIA GPUs, run on a CPU by Pallas's interpreter, which has its threads, barriers and memories.

In float32, so that a key left out or counted twice cannot pass for rounding; with the interpreter's race detection;
and with NaN and infinities wherever no live token lies. Needs JAX 0.11 for Hopper and 0.12 for Ampere and Blackwell;
`tests/gpu/check.sh` makes environments with them. `test_ampere.py` says what is interpreted of the Ampere kernel.

What is marked `whole` is run when the kernels have changed since the last whole run, see `tests/gpu/check.sh`; the rest
by every CI run.
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
from support.gpu_aot import card as described
from support.kernel_paths import few_cores

from pallas_kernels.cards import CARDS, card_of
from pallas_kernels.paged_attention import mosaic_gpu
from pallas_kernels.paged_attention.cases import CASES, Case, operands
from pallas_kernels.paged_attention.mosaic_gpu import (
    card_for,
    needed_jax,
    paged_attention_mosaic_gpu,
    unsupported,
)
from pallas_kernels.paged_attention.tuning import Tuning


def whole(*values):
    """Parameters of a test that only a whole run takes."""
    return pytest.param(*values, marks=pytest.mark.whole)


def on_cards(*names: str):
    """Runs the test for cards of so few cores that each of them goes through several parts, as on a real one."""

    def of(name: str):
        needed = needed_jax(CARDS[name])
        reason = f"needs JAX {needed[0]}.{needed[1]}, this is {jax.__version__}; .ci/run has environments with it"
        old = pytest.mark.skipif(jax.__version_info__ < needed, reason=reason)
        return pytest.param(few_cores(name), id=name, marks=old)

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
@pytest.mark.parametrize("name", [name if case.core else whole(name) for name, case in CASES.items()])
def test_every_case(name, card):
    """Catches: a page, a stage or a part that is not waited for, or is overwritten; a block, a column or a head off by
    one; the poison of a masked key; padding that is not zero."""
    case = CASES[name]
    needed = needed_jax(card_for(card, case.page_size, case.head_dim))
    if jax.__version_info__ < needed:
        pytest.skip(f"copies rows as on Ampere, which needs JAX {needed}; .ci/run has an environment with it")
    arguments = operands(case)
    out, lse = run(case, arguments, card, return_lse=True)
    expected, expected_lse = in_numpy(case, *arguments, return_lse=True)
    np.testing.assert_allclose(out, expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5, rtol=1e-5)
    assert (out[case.num_tokens - case.padding :] == 0).all()


@on_cards("a100", "h100", "b200")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, whole(jnp.float16)])
@pytest.mark.parametrize(
    "name", ["mixed-page64", *map(whole, ("decode-page16", "head_dim256", "soft_cap-window", "long-chunk"))]
)
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
@pytest.mark.whole
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
    "tuning",
    [Tuning(1, 128, 2, 2, 0), *map(whole, (Tuning(2, 64, 3, 2, 0), Tuning(1, 64, 2, 1, 9), Tuning(2, 128, 2, 1, 1)))],
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
@pytest.mark.parametrize("poisoned", [0, whole(1)], ids=["values", "keys"])
@pytest.mark.parametrize("page", [whole(3), 17])
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


def test_a_card_is_known_by_what_jax_tells_of_it():
    """Catches: an H200 taken for an H20, a consumer card taken for a server's, a slice of a card taken for all of it, a
    card that no list has and that gets no kernel for it."""
    assert card_of("NVIDIA H100 80GB HBM3") is CARDS["h100"]
    assert card_of("NVIDIA GH200 480GB", "9.0", 132) is CARDS["h200"]
    assert card_of("NVIDIA A100-SXM4-80GB", "8.0") is CARDS["a100"]
    assert card_of("NVIDIA B200", (10, 0), 148) is CARDS["b200"]
    assert card_of("NVIDIA H20") is card_of("NVIDIA GeForce RTX 4090") is card_of("cpu") is None
    assert card_of("AMD Instinct MI300X", "gfx942", 304) is None
    for kind, capability, kernel, shared in (
        ("NVIDIA GeForce RTX 3060", "8.6", "ampere", 101_376),
        ("NVIDIA A10", "8.6", "ampere", 101_376),
        ("NVIDIA L4", "8.9", "ampere", 101_376),
        ("NVIDIA H20", "9.0", "hopper", 232_448),
        ("NVIDIA B300 SXM6", "10.3", "blackwell", 232_448),
        ("NVIDIA Thor", "11.0", "ampere", 101_376),
        ("NVIDIA GeForce RTX 5090", "12.0", "ampere", 101_376),
        ("NVIDIA of a later year", "15.3", "ampere", 101_376),
        ("Tesla T4", "7.5", None, 65_536),
        ("Tesla V100-SXM2-16GB", "7.0", None, 65_536),
    ):
        card = card_of(kind, capability, 28)
        assert (card.name, card.kernel, card.shared_bytes, card.cores) == (kind, kernel, shared, 28)
        assert card.estimated and 1e11 < card.bytes_per_s < 1e13 and 1e13 < card.flops_per_s < 1e15
    assert card_of("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "9.0", 16).cores == 16
    assert card_of("NVIDIA GeForce RTX 4090", "8.9", 9).flops_per_s < card_of("NVIDIA L4", "8.9", 9).flops_per_s


@pytest.mark.parametrize("name", ["a10", "l4", "b300", "rtx5090"])
def test_every_capability_from_8_0_has_a_kernel(name, monkeypatch):
    """Catches: a card of a list taken for all that there are; a kernel that a card's JAX cannot compile."""
    card = described(name)
    monkeypatch.setattr(mosaic_gpu, "target_card", lambda: card)
    operands = jax.ShapeDtypeStruct((3, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((1, 4, 2, 16, 128), jnp.bfloat16)
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    assert mosaic_gpu.missing(*operands) is None
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert "needs JAX 0.12" in mosaic_gpu.missing(*operands)


def test_a_card_older_than_ampere_says_so(monkeypatch):
    """Catches: a T4 that is given a kernel it cannot run, or whose user is not told why there is none."""
    card = described("t4")
    monkeypatch.setattr(mosaic_gpu, "target_card", lambda: card)
    operands = jax.ShapeDtypeStruct((3, 8, 64), jnp.float16), jax.ShapeDtypeStruct((1, 4, 2, 16, 64), jnp.float16)
    assert mosaic_gpu.missing(*operands) == "it needs compute capability 8.0 or later, and NVIDIA T4 has 7.5"
    with pytest.raises(ValueError, match="no kernel"):
        needed_jax(card_for(card, 16, 64))


@pytest.mark.whole
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


@pytest.mark.whole
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
