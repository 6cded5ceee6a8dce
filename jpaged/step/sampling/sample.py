"""From logits to one token a row.

Every row has options of its own. A row's randomness comes from its request's seed and the position of the new token,
and belongs to the token ids, so what a row draws does not depend on its neighbours or on what they ask for. Work that
only some options need (random numbers, a sort of the vocabulary) is done when a row of the step needs it: two
conditionals, which on a GPU cost one host round trip a step in exchange for a sort of `rows x vocab`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jpaged.step.sampling.draw import draw, largest
from jpaged.step.sampling.logprobs import logprob_of
from jpaged.step.sampling.params import Sampling
from jpaged.step.stop import banned


def sample(
    logits: jax.Array, sampling: Sampling, num_tokens: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Chooses a token a row.

    Bans, then temperature, min-p, top-k and top-p, as vLLM orders them. Ties at a boundary go to the lowest ids.

    Args:
        logits: `[rows, vocab]` float32.
        sampling: the options `[rows]`.
        num_tokens: `[rows]` int32, tokens that each request has: the position of the one to be sampled.

    Returns:
        token `[rows]` int32; its log-probability under `logits` as they are, `[rows]` float32; and whether the row
        could be sampled, `[rows]` bool: not where a logit is NaN or +inf or all are -inf.
    """
    rows, vocab = logits.shape
    # A decoder that computes columns has them still: transposed twice is not transposed at all.
    columns = logits.T
    top = jnp.max(columns, axis=0)

    bans = banned(sampling, num_tokens)
    bans = jnp.where((bans >= 0) & (bans < vocab), bans, vocab)  # an id outside the vocabulary bans nothing
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    allowed = columns.at[bans, row].set(-jnp.inf, mode="drop")

    # The maximum is NaN if any logit is; after the bans something must be left to choose.
    best, greedy = largest(allowed)
    healthy = jnp.isfinite(top) & jnp.isfinite(best)
    token = jax.lax.cond(
        jnp.any(sampling.temperature > 0),
        lambda: jnp.where(sampling.temperature > 0, draw(allowed.T, sampling, num_tokens), greedy),
        lambda: greedy,
    )
    return token, logprob_of(columns, top, token), healthy
