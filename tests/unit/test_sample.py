"""The sampler against a plain one that sorts and loops; and that a row is nobody else's business."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import at_least

from jpaged.request import SamplingParams
from jpaged.step.sampling.draw import gumbel
from jpaged.step.sampling.params import NO_TOKEN, Asked, Sampling
from jpaged.step.sampling.sample import sample
from jpaged.step.sampling.truncate import by_rank

VOCAB, NEVER = 256, 2**31 - 1
_sample = jax.jit(sample)


@dataclass(frozen=True)
class Rows:
    """What the sampler knows of each row."""

    sampling: Sampling
    position: jax.Array


jax.tree_util.register_dataclass(Rows)


def jit_sample(logits, rows: Rows):
    return _sample(logits, rows.sampling, rows.position)


def rows(count: int, *, banned=(), position=5, **options) -> Rows:
    """Greedy rows, but for what `options` say; a single value goes to every row. `banned[i]` are ids that row i must
    not sample: stop tokens of a request that is too short."""
    sampling = Sampling.empty(count)
    for name, value in options.items():
        getattr(sampling, name)[:] = value
    for row, ids in enumerate(banned):
        sampling.stop_ids[row, : len(ids)] = ids
        sampling.min_len[row] = NEVER
    position = np.broadcast_to(np.asarray(position, np.int32), count)
    return jax.tree.map(jnp.asarray, Rows(sampling, position))


def one(inputs: Rows, row: int) -> Rows:
    return jax.tree.map(lambda a: a[row : row + 1], inputs)


def kept(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> set[int]:
    """The ids that can be drawn: vLLM's order of temperature, min-p, top-k, top-p, ties to the lowest id."""
    scaled = np.asarray(logits, np.float64) / temperature
    probability = np.exp(scaled - scaled.max())
    probability /= probability.sum()
    left = [i for i in range(len(logits)) if probability[i] >= min_p * probability.max() * (1 - 1e-9)]
    left.sort(key=lambda i: (-scaled[i], i))
    if top_k > 0:
        left = left[:top_k]
    total = probability[left].sum()
    result, reached = set(), 0.0
    for i in left:
        if reached >= top_p * total:
            break
        result.add(i)
        reached += probability[i]
    return result


def draw_many(logits, count: int, **fields) -> np.ndarray:
    """`count` draws of one row, each with its own seed."""
    stacked = jnp.tile(jnp.asarray(logits, jnp.float32), (count, 1))
    token, _, healthy = jit_sample(stacked, rows(count, seed=np.arange(count), **fields))
    assert healthy.all()
    return np.asarray(token)


# Greedy


def test_greedy_takes_the_largest_and_the_lowest_id_on_a_tie():
    """Catches: a tie that depends on the order of a sort or on the batch."""
    logits = np.zeros((3, VOCAB), np.float32)
    logits[0, [7, 200]], logits[1, [255, 254]] = 3, 1
    token, _, healthy = jit_sample(jnp.asarray(logits), rows(3))
    assert token.tolist() == [7, 254, 0]
    assert token.dtype == jnp.int32 and healthy.all()


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-30])
def test_a_tiny_temperature_is_greedy_and_finite(temperature):
    """SA-01: logits / temperature that overflows gives NaN, or an empty text."""
    logits = np.random.default_rng(0).normal(0, 3, (8, VOCAB)).astype(np.float32)
    logits[np.arange(8), np.arange(8) * 30] = 11
    for fields in ({}, {"top_p": 1e-4}, {"top_k": 3, "min_p": 0.1}):
        inputs = rows(8, temperature=temperature, seed=np.arange(8), **fields)
        token, logprob, healthy = jit_sample(jnp.asarray(logits), inputs)
        assert token.tolist() == (np.arange(8) * 30).tolist()
        assert np.isfinite(logprob).all() and healthy.all()


def test_a_tiny_top_p_is_greedy():
    """SA-01: the smallest set is never empty."""
    logits = np.random.default_rng(1).normal(0, 3, VOCAB)
    assert set(draw_many(logits, 50, temperature=1.0, top_p=1e-4)) == {int(np.argmax(logits))}


# Truncation


def test_top_k_above_the_vocabulary_or_0_is_off():
    """SA-03: k passed straight to a top-k op crashes or clamps."""
    logits = np.random.default_rng(2).normal(0, 2, VOCAB)
    off = draw_many(logits, 64, temperature=1.0)
    for top_k in (VOCAB, 1_000_000, 2**31 - 1, 0):
        np.testing.assert_array_equal(draw_many(logits, 64, temperature=1.0, top_k=top_k), off)


def test_flat_logits_give_many_ids():
    """SA-04: a default top_k that turns sampling into greedy."""
    assert len(set(draw_many(np.zeros(VOCAB), 200, temperature=1.0))) > 50


def test_top_k_1_on_a_tie_is_greedy():
    """SA-04: a threshold that keeps all tied values."""
    assert set(draw_many([1, 5, 5, 0], 50, temperature=1.0, top_k=1)) == {1}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_k": 3}, {0, 1, 2}),  # of five equal ones
        ({"top_k": 6}, {0, 1, 2, 3, 4, 5}),
        ({"top_p": 0.38}, {0, 1}),  # each has nearly a fifth
        ({"top_p": 0.41}, {0, 1, 2}),
        ({"min_p": 0.2}, {0, 1, 2, 3, 4}),
        ({"min_p": 1.0}, {0, 1, 2, 3, 4}),
        ({"min_p": 0.5, "top_k": 2}, {0, 1}),
        ({"top_k": 4, "top_p": 0.49}, {0, 1}),  # top-p counts within the four
        ({"top_k": 4, "top_p": 0.51}, {0, 1, 2}),
    ],
)
def test_ties_at_a_boundary_go_to_the_lowest_ids(fields, expected):
    """Catches: too many or too few kept where values are equal, and a top-p taken over another set."""
    logits = np.full(16, -20.0)
    logits[:5] = 2
    logits[5] = 0
    drawn = set(draw_many(logits, 300, temperature=1.0, **fields).tolist())
    assert drawn == expected


@at_least(100)
@given(
    logits=st.lists(st.integers(-12, 12), min_size=24, max_size=24),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 30),
    top_p=st.sampled_from([0.13, 0.37, 0.73, 0.917, 1.0]),
    min_p=st.sampled_from([0.0, 0.011, 0.23, 1.0]),
)
def test_what_can_be_drawn_equals_a_plain_sort(logits, temperature, top_k, top_p, min_p):
    """Catches: an order of min-p, top-k and top-p that differs from vLLM's, a boundary off by one, a sort that loses
    ids. 64 seeds are drawn; each id must be among those that the plain sampler keeps, and the likeliest must come."""
    allowed = kept(np.array(logits) / 2, temperature, top_k, top_p, min_p)
    fields = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    drawn = set(draw_many(np.array(logits) / 2, 64, **fields).tolist())
    assert drawn <= allowed
    if len(allowed) == 1:
        assert drawn == allowed


@at_least(100)
@given(
    logits=st.lists(st.integers(-12, 12), min_size=24, max_size=24),
    top_k=st.integers(1, 24),
    top_p=st.sampled_from([0.13, 0.37, 0.73, 0.917, 1.0]),
)
def test_truncation_keeps_exactly_what_a_plain_sort_keeps(logits, top_k, top_p):
    """The kept set itself, as drawing seldom shows an unlikely id that is wrongly missing."""
    scaled = jnp.asarray(logits, jnp.float32)[None] / 2
    out = jax.jit(by_rank)(scaled, jnp.array([top_k], jnp.int32), jnp.array([top_p], jnp.float32))
    left = np.flatnonzero(np.isfinite(np.asarray(out[0])))
    assert set(left.tolist()) == kept(np.array(logits) / 2, 1.0, top_k, top_p)
    np.testing.assert_array_equal(np.asarray(out[0])[left], np.asarray(scaled[0])[left])


def test_draws_follow_the_distribution():
    """Catches: noise added twice, a temperature applied the wrong way round. Seeds are fixed; a chi-squared statistic
    over 8 ids stays below its 99.9% point (24.3 for 7 degrees of freedom)."""
    logits = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5])
    for temperature in (0.7, 1.0, 1.6):
        count = 4000
        expected = np.exp(logits / temperature)
        expected *= count / expected.sum()
        found = np.bincount(draw_many(logits, count, temperature=temperature), minlength=8)
        assert np.sum((found - expected) ** 2 / expected) < 24.3
    top_two = np.bincount(draw_many(logits, 4000, temperature=1.0, top_k=2), minlength=8)
    share = 1 / (1 + math.exp(-0.5))
    assert abs(top_two[0] / 4000 - share) < 0.03 and top_two[2:].sum() == 0


# Rows


def mixed(count: int = 8) -> tuple[np.ndarray, Rows]:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 2, (count, VOCAB)).astype(np.float32)
    return logits, rows(
        count,
        temperature=np.resize([0, 0.8, 1.3, 0.8, 0, 0.8, 1.0, 2.0], count),
        top_k=np.resize([0, 0, 5, 0, 7, 1, 0, 40], count),
        top_p=np.resize([1, 1, 1, 0.6, 0.5, 1, 1, 0.95], count),
        min_p=np.resize([0, 0, 0, 0, 0.1, 0, 0.05, 0], count),
        seed=np.arange(count) + 2**32 - 4 - count,
        position=np.arange(count) * 11,
    )


def test_a_row_draws_the_same_alone_and_in_every_slot():
    """A seed belongs to the request: not to its slot, the batch, or what the neighbours ask for."""
    logits, inputs = mixed()
    count = len(logits)
    expected = jax.tree.map(np.asarray, jit_sample(jnp.asarray(logits), inputs))
    for row in range(count):
        alone = jit_sample(jnp.asarray(logits[row : row + 1]), one(inputs, row))
        for mine, whole in zip(alone, expected, strict=True):
            np.testing.assert_array_equal(mine[0], whole[row])
    for shift in (1, 3):
        order = np.roll(np.arange(count), shift)
        moved = jit_sample(jnp.asarray(logits[order]), jax.tree.map(lambda a, o=order: a[o], inputs))
        for mine, whole in zip(moved, expected, strict=True):
            np.testing.assert_array_equal(mine, whole[order])


def test_a_neighbour_that_sorts_changes_nothing():
    """Catches: the branch with the sort treating rows that asked for none. A greedy row and a plainly sampled one give
    the same to the bit when no neighbour, a sampled one, or a truncated one is beside them."""
    logits = np.random.default_rng(4).normal(0, 2, (3, VOCAB)).astype(np.float32)
    seen = []
    for neighbour in ({}, {"temperature": [0, 1, 0.5]}, {"temperature": [0, 1, 0.5], "top_k": [0, 0, 3]},
                      {"temperature": [0, 1, 0.5], "top_p": [1, 1, 0.2]}):  # fmt: skip
        fields = {"temperature": [0, 1, 0]} | neighbour
        token, logprob, healthy = jit_sample(jnp.asarray(logits), rows(3, seed=[1, 2, 3], **fields))
        seen.append((token[:2].tolist(), logprob[:2].tolist(), healthy.tolist()))
    assert all(row == seen[0] for row in seen)


def test_a_greedy_row_ignores_its_own_truncation_and_seed():
    logits = jnp.asarray(np.random.default_rng(5).normal(0, 2, (2, VOCAB)), jnp.float32)
    plain = jit_sample(logits, rows(2))
    odd = jit_sample(logits, rows(2, top_k=[1, 9], top_p=0.1, min_p=0.9, seed=[4, 5], position=[0, 99]))
    jax.tree.map(np.testing.assert_array_equal, plain, odd)


def test_seed_and_position_make_the_key():
    """Catches: the same noise at every position (loops), or for every request."""
    logits = jnp.zeros((64, VOCAB))
    by_position = jit_sample(logits, rows(64, temperature=1.0, position=np.arange(64)))[0]
    by_seed = jit_sample(logits, rows(64, temperature=1.0, seed=np.arange(64) + 2**32 - 64))[0]
    same = jit_sample(logits, rows(64, temperature=1.0))[0]
    assert len(set(by_position.tolist())) > 40 and len(set(by_seed.tolist())) > 40 and len(set(same.tolist())) == 1


# Banned ids, broken rows, log-probabilities


def test_banned_ids_are_never_chosen_and_odd_ones_ban_nothing():
    """SA-08: min_tokens bans stop ids; one outside the vocabulary must not wrap around to another id, and the -1 that
    fills unused places must not ban the last id."""
    logits = np.zeros((4, VOCAB), np.float32)
    logits[:, VOCAB - 1], logits[:, 9], logits[:, 3] = 9, 8, 7
    banned = [[VOCAB - 1], [VOCAB - 1, 9], [], [300, VOCAB, 2**31 - 1]]
    token, logprob, healthy = jit_sample(jnp.asarray(logits), rows(4, banned=banned))
    assert token.tolist() == [9, 3, VOCAB - 1, VOCAB - 1] and healthy.all()
    # What the model said is reported, banned or not.
    expected = np.asarray(jax.nn.log_softmax(jnp.asarray(logits[0])))
    np.testing.assert_allclose(logprob, expected[[9, 3, VOCAB - 1, VOCAB - 1]], rtol=1e-6)
    drawn = draw_many(logits[0], 100, temperature=3.0, top_k=2, banned=[[VOCAB - 1]] * 100)
    assert set(drawn.tolist()) == {9, 3}


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_broken_row_fails_alone(broken, sampled):
    """NU-03, JX-07: one NaN, one inf, or nothing but -inf: that row is not healthy, its id is still in range, and the
    others are what they are without it."""
    logits, inputs = mixed()
    if not sampled:
        inputs = replace(inputs, sampling=inputs.sampling.where(jnp.array(False)))
    expected = jax.tree.map(np.asarray, jit_sample(jnp.asarray(logits), inputs))
    logits[1, 77] = broken
    logits[3, :] = -np.inf
    logits[6, :] = np.nan
    token, logprob, healthy = jax.tree.map(np.asarray, jit_sample(jnp.asarray(logits), inputs))
    well = np.array([True, False, True, False, True, True, False, True])
    np.testing.assert_array_equal(healthy, well)
    np.testing.assert_array_equal(token[well], expected[0][well])
    np.testing.assert_array_equal(logprob[well], expected[1][well])
    assert ((token >= 0) & (token < VOCAB)).all()


def test_a_row_with_some_minus_inf_is_healthy():
    """A model may forbid ids itself (a padded vocabulary): SA-08. They are never drawn."""
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, [4, 250]] = 0
    assert set(draw_many(logits[0], 60, temperature=5.0).tolist()) == {4, 250}


def test_log_probabilities_are_those_of_the_model():
    """Under the logits as they are: before temperature, truncation and bans; also where they are large."""
    logits, inputs = mixed()
    for shift in (0.0, 1e4):
        token, logprob, _ = jit_sample(jnp.asarray(logits + shift), inputs)
        wide = (logits + np.float32(shift)).astype(np.float64)
        expected = wide - np.log(np.sum(np.exp(wide - wide.max(1, keepdims=True)), 1, keepdims=True))
        expected -= wide.max(1, keepdims=True)
        np.testing.assert_allclose(logprob, expected[np.arange(8), token], atol=1e-4 if shift == 0 else 2e-3)


# Options, and settings of JAX


def test_options_follow_from_what_was_asked_for():
    """Catches: an option that does not reach the arrays, a row that keeps what stood there, a length past the limit."""
    params = SamplingParams(
        temperature=0.5, top_k=-1, top_p=0.25, min_p=0.125, max_tokens=None, min_tokens=7, stop_token_ids=[3, 4]
    )
    sampling = Sampling.empty(2)
    sampling.fill(1, Asked(params, num_prompt_tokens=5, max_model_len=10, stop_ids=[9, 3, 4], seed=2**32 - 1))
    plain, row = (jax.tree.map(lambda array, i=i: array[i], sampling) for i in (0, 1))
    jax.tree.map(np.testing.assert_array_equal, plain, jax.tree.map(lambda array: array[0], Sampling.empty(1)))
    assert (row.temperature, row.top_k, row.top_p, row.min_p, row.seed) == (0.5, 0, 0.25, 0.125, 2**32 - 1)
    assert (row.max_len, row.min_len) == (10, 10) and row.stop_ids.tolist() == [9, 3, 4] + [NO_TOKEN] * 13
    limited = Asked(SamplingParams(max_tokens=2), num_prompt_tokens=5, max_model_len=10, stop_ids=[], seed=0)
    sampling = Sampling.empty(1)
    sampling.fill(0, limited)
    assert (sampling.max_len[0], sampling.min_len[0]) == (7, 5)


def settings_of_jax():
    """Settings that change what `jax.random` or `jax.numpy` do, or what JAX checks."""
    return {
        "default": contextlib.nullcontext(),
        "rbg": jax.default_prng_impl("rbg"),
        "threefry of old": jax.threefry_partitionable(False),
        "x64": jax.enable_x64(True),
        "ranks": jax.numpy_rank_promotion("raise"),
        "leaks": jax.checking_leaks(),
        "nans": jax.debug_nans(True),
    }


def test_no_setting_of_jax_changes_a_token():
    """U-12: a key of the process's default kind gives one request other tokens alone and as the third of a batch.
    U-13: the sampler works under JAX's checks."""
    logits = np.random.default_rng(6).normal(0, 2, (3, VOCAB)).astype(np.float32)
    fields = {"temperature": [0, 0.5, 1], "top_k": [0, 9, 0], "top_p": [1, 1, 0.9], "seed": [1, 2, 3]}
    seen, noise = {}, {}
    for name, setting in settings_of_jax().items():
        with setting:
            batch = rows(3, **fields)
            tokens = jit_sample(jnp.asarray(logits), batch)[0]
            assert jit_sample(jnp.asarray(logits[2:]), one(batch, 2))[0].tolist() == tokens[2:].tolist(), name
            seen[name] = tokens.tolist()
            noise[name] = np.asarray(jax.jit(gumbel, static_argnums=2)(jnp.uint32(7), jnp.int32(11), VOCAB))
    assert all(tokens == seen["default"] for tokens in seen.values()), seen
    for name, values in noise.items():
        np.testing.assert_array_equal(values, noise["default"], name)
    # Those that requests have had since JAX 0.5, where nothing was set.
    key = jax.random.fold_in(jax.random.key(7, impl="threefry2x32"), 11)
    np.testing.assert_allclose(noise["default"], jax.random.gumbel(key, (VOCAB,), jnp.float32), rtol=1e-6)
