"""What layers are made of beside products with weights. Activations are columns: `[features, tokens]`."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.models.spec import Rope


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm of each column of `x` `[features, tokens]`, computed in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=0, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight[:, None]


def rope_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Inverse frequencies `[head_dim / 2]` float32, stretched as `rope` says.

    "llama3" follows Llama 3.1: wavelengths longer than `original / low_freq_factor` are divided by `factor`, those
    shorter than `original / high_freq_factor` are kept, and between the two lies a linear passage.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    inverse = 1.0 / rope.theta**exponent
    scaling, factors = rope.scaling, rope.factors
    if factors is not None:
        inverse = inverse / np.asarray(factors, np.float64)
    elif scaling is not None and scaling.kind == "linear":
        inverse = inverse / scaling.factor
    elif scaling is not None and scaling.kind == "llama3":
        wavelength = 2 * math.pi / inverse
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        smooth = (scaling.original_max_position_embeddings / wavelength - low) / (high - low)
        smooth = np.clip(smooth, 0.0, 1.0)
        inverse = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    return inverse.astype(np.float32)


def rope_tables(frequencies: np.ndarray, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Factors `[2, head_dim / 2, tokens]` float32 for `rotate` at `positions` `[tokens]`: the cosines for both halves
    of the features, and the sines with the sign that each half takes."""
    angle = jnp.asarray(frequencies)[:, None] * positions.astype(jnp.float32)[None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    # Two stacks, not a broadcast: XLA would fuse the cosine into each layer's use of it, once for every head.
    return jnp.stack([cos, cos]), jnp.stack([-sin, sin])


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of `x` `[..., head_dim, tokens]`: feature `i` turns with feature `i + head_dim / 2`."""
    cos, sin = (jnp.expand_dims(table, range(x.ndim - 2)) for table in (cos, sin))
    halves = x.astype(jnp.float32).reshape(*x.shape[:-2], 2, x.shape[-2] // 2, x.shape[-1])
    # A flip of the halves, not two slices put together again: XLA on a CPU is 5 times slower at those.
    turned = halves * cos + jnp.flip(halves, -3) * sin
    return turned.astype(x.dtype).reshape(x.shape)
