"""Drawing a token: temperature, truncation, noise, and the largest sum.

The noise belongs to (seed, position, token id). It is made of Threefry words by this module and not by a key of
`jax.random`, whose bits depend on settings of the process (`jax_default_prng_impl`, `jax_threefry_partitionable`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

from jpaged.step.sampling.params import Sampling
from jpaged.step.sampling.truncate import truncate


def draw(logits: jax.Array, sampling: Sampling, position: jax.Array) -> jax.Array:
    """A token `[rows]` int32 for each row of logits `[rows, vocab]`, the one at `position` `[rows]` of its request."""
    # The largest becomes 0 before the division, so that no temperature overflows.
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1)
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[:, None]
    scaled = truncate(scaled, sampling)
    noise = jax.vmap(lambda seed, place: gumbel(seed, place, logits.shape[1]))(sampling.seed, position)
    return largest((scaled + noise).T)[1]


def gumbel(seed: jax.Array, position: jax.Array, vocab: int) -> jax.Array:
    """Noise `[vocab]` float32 of a seed `[]` uint32 and a position `[]` int32, the same in every process: that of
    `jax.random.gumbel(fold_in(key(seed), position))` in JAX's default settings since 0.5."""
    zero = jnp.zeros((), jnp.uint32)
    key = threefry_2x32(jnp.stack([zero, seed]), jnp.stack([zero, position.astype(jnp.uint32)]))
    ids = jnp.arange(vocab, dtype=jnp.uint32)
    words = threefry_2x32(key, jnp.concatenate([jnp.zeros_like(ids), ids]))
    bits = words[:vocab] ^ words[vocab:]
    # 23 bits make the fraction of a number in [1, 2).
    uniform = jax.lax.bitcast_convert_type((bits >> jnp.uint32(9)) | jnp.uint32(0x3F800000), jnp.float32) - 1
    tiny = jnp.finfo(jnp.float32).tiny
    return -jnp.log(-jnp.log(jnp.maximum(uniform * (1 - tiny) + tiny, tiny)))


def largest(columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The maximum `[rows]` of each column of `[vocab, rows]`, and the lowest id that has it; NaN and some id where
    there is a NaN. XLA on a CPU does not vectorise `argmax`, so the maximum is looked for by value: first the block of
    ids, then in the block. All of `columns` is read once, for the maxima of the blocks."""
    vocab, rows = columns.shape
    block = min((size for size in range(1, vocab + 1) if vocab % size == 0), key=lambda size: size + vocab // size)
    blocks = columns.reshape(vocab // block, block, rows)
    of_block = jnp.max(blocks, axis=1)
    value = jnp.max(of_block, axis=0)
    first = _first_of(of_block, value)
    inside = jnp.take_along_axis(blocks, first[None, None], axis=0)[0]
    return value, first * block + _first_of(inside, value)


def _first_of(columns: jax.Array, value: jax.Array) -> jax.Array:
    """The lowest index `[rows]` where a column of `[n, rows]` has `value` `[rows]`; some index where it has it nowhere,
    as with NaN."""
    ids = jnp.arange(columns.shape[0], dtype=jnp.int32)[:, None]
    return jnp.min(jnp.where(columns == value[None], ids, columns.shape[0] - 1), axis=0)
