"""When a request ends, and which tokens may not end it yet: one rule for the engine and for static batching."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jpaged.step.sampling.params import NO_TOKEN, Sampling
from jpaged.step.status import Finish


def finish(
    sampling: Sampling, token: jax.Array, num_tokens: jax.Array, sampled: jax.Array, failed: jax.Array
) -> jax.Array:
    """Why the requests `[N]` end, a `Finish` `[N]` int32.

    Args:
        token: `[N]` int32, the new token.
        num_tokens: `[N]` int32, tokens with the new one.
        sampled: `[N]` bool, whether there is a new token.
        failed: `[N]` bool, whether its logits were not finite: also in the middle of a prompt, as what its pages hold
            then is of no use.
    """
    stops = sampled & jnp.any(sampling.stop_ids == token[:, None], axis=1)
    full = sampled & (num_tokens >= sampling.max_len)
    ended = jnp.where(stops, Finish.STOP, jnp.where(full, Finish.LENGTH, Finish.NOT))
    return jnp.where(failed, Finish.ERROR, ended).astype(jnp.int32)


def banned(sampling: Sampling, num_tokens: jax.Array) -> jax.Array:
    """Ids `[N, K]` int32 that must not be sampled by requests of `num_tokens` `[N]` tokens, NO_TOKEN where unused:
    stop tokens before `min_len`."""
    return jnp.where((num_tokens < sampling.min_len)[:, None], sampling.stop_ids, NO_TOKEN)
