"""Vectors for numba: what the kernels for a CPU are made of, each operation against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.cpu import simd, units


@simd.compiled
def exp_of(source, target, count):
    for at in range(0, count * units.FLOAT, units.VECTOR):
        simd.store(target + at, simd.exp(simd.load(source + at)))


@simd.compiled
def turn(source, target, source_stride, target_stride):
    simd.transpose(source, source_stride, target, target_stride)


@simd.compiled
def reductions(source, other, target):
    a, b = simd.load(source), simd.load(other)
    simd.store(target, simd.larger(a, b))
    simd.store(target + units.VECTOR, simd.fma(a, b, simd.sub(simd.mul(a, simd.splat(np.float32(2))), simd.add(a, b))))
    simd.store_float(target + 2 * units.VECTOR, simd.total(a))
    simd.store_float(target + 2 * units.VECTOR + units.FLOAT, simd.largest(a))


@simd.compiled
def counted(address):
    return simd.fetch_add(address, 3), simd.load_word(address), simd.load_int32(address)


def exponentials(x) -> np.ndarray:
    source = np.resize(np.asarray(x, np.float32), -(-len(x) // units.LANES) * units.LANES)
    target = np.empty_like(source)
    exp_of(source.ctypes.data, target.ctypes.data, source.size)
    return target[: len(x)]


def test_exp_is_right_to_two_units_in_the_last_place():
    x = -np.concatenate([np.linspace(0, 87, 200_001), np.geomspace(1e-8, 80, 100_003)]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(exponentials(x) - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()


def test_exp_at_the_edges():
    """Catches: NaN that becomes a number (a sick request would be served), a score of -inf that weighs something."""
    found = exponentials([0.0, -0.0, -np.inf, -1000.0, -88.0, np.nan, -1e-30, -87.0])
    np.testing.assert_array_equal(found[:5], [1, 1, 0, 0, 0])
    assert np.isnan(found[5])
    assert found[6] == 1
    assert found[7] > 0


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (11, 9)])
def test_a_block_is_turned(rows, columns):
    source = np.arange(8 * rows, dtype=np.float32).reshape(8, rows)
    target = np.full((8, columns), -1, np.float32)
    turn(source.ctypes.data, target.ctypes.data, rows * units.FLOAT, columns * units.FLOAT)
    np.testing.assert_array_equal(target[:, :8], source[:, :8].T)
    assert (target[:, 8:] == -1).all()


def test_arithmetic_and_reductions():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, units.LANES)).astype(np.float32)
    out = np.empty(2 * units.LANES + 2, np.float32)
    reductions(a.ctypes.data, b.ctypes.data, out.ctypes.data)
    np.testing.assert_array_equal(out[: units.LANES], np.maximum(a, b))
    np.testing.assert_allclose(out[units.LANES : -2], a * b + (2 * a - (a + b)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out[-2:], [a.sum(), a.max()], rtol=1e-6)


def test_words_and_integers():
    place = np.array([-5], np.int64)
    assert counted(place.ctypes.data) == (-5, -2, -2)
