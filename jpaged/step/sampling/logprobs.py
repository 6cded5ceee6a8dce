"""Log-probabilities under the logits as the model gave them: before temperature, truncation and bans."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def logprob_of(columns: jax.Array, top: jax.Array, token: jax.Array) -> jax.Array:
    """The log-probability `[rows]` float32 of `token` `[rows]` under logits as columns `[vocab, rows]`, whose maxima
    are `top` `[rows]`."""
    chosen = jnp.take_along_axis(columns, token[None], axis=0)[0]
    return chosen - top - jnp.log(jnp.sum(jnp.exp(columns - top[None]), axis=0))


def most_probable(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` most probable tokens `[rows, count]` int32 of logits `[rows, vocab]`, of equal ones the lowest ids
    first, and their log-probabilities `[rows, count]` float32."""
    if count == 0:
        empty = jnp.zeros((logits.shape[0], 0), jnp.float32)
        return empty.astype(jnp.int32), empty
    logprobs, tokens = jax.lax.top_k(jax.nn.log_softmax(logits, axis=-1), count)
    return tokens, logprobs
