"""Which tokens can be drawn: min-p, top-k and top-p."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jpaged.step.sampling.params import Sampling


def truncate(scaled: jax.Array, sampling: Sampling) -> jax.Array:
    """`scaled` `[rows, vocab]`, logits after the temperature whose maximum is 0; -inf where a token is cut off. Min-p
    comes first, then top-k, then top-p, as in vLLM. The vocabulary is sorted only if a sampled row asks for it."""
    vocab = scaled.shape[1]
    scaled = jnp.where(scaled >= jnp.log(sampling.min_p)[:, None], scaled, -jnp.inf)
    top_k = jnp.where((sampling.top_k > 0) & (sampling.top_k < vocab), sampling.top_k, vocab)
    asks = ((top_k < vocab) | (sampling.top_p < 1)) & (sampling.temperature > 0)
    return jax.lax.cond(
        jnp.any(asks),
        lambda: jnp.where(asks[:, None], by_rank(scaled, top_k, sampling.top_p), scaled),
        lambda: scaled,
    )


def by_rank(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """-inf outside the `top_k` `[rows]` largest and, among those, the fewest whose probability reaches `top_p`
    `[rows]`. Of equal logits the lowest ids stay."""
    vocab = scaled.shape[1]
    ids = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32)[None], scaled.shape)
    # Stable, so that equal logits stand in the order of their ids.
    negative, sorted_ids = jax.lax.sort((-scaled, ids), dimension=1, num_keys=1, is_stable=True)
    rank = jnp.arange(vocab, dtype=jnp.int32)[None]
    probability = jax.nn.softmax(jnp.where(rank < top_k[:, None], -negative, -jnp.inf), axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    count = jnp.sum((before < top_p[:, None]) & (rank < top_k[:, None]), axis=-1, keepdims=True, dtype=jnp.int32)
    # The last one that is kept marks the boundary, by value and among equals by id.
    edge = -jnp.take_along_axis(negative, count - 1, axis=-1)
    edge_id = jnp.take_along_axis(sorted_ids, count - 1, axis=-1)
    kept = (scaled > edge) | ((scaled == edge) & (ids <= edge_id))
    return jnp.where(kept, scaled, -jnp.inf)
