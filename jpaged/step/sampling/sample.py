"""From logits to one token a row.

Every row has its own parameters. A row's randomness comes from its request's seed and the position of the new token,
and belongs to the token ids, so what a row draws does not depend on its neighbours or on what they ask for. Work that
only some parameters need (random numbers, a sort of the vocabulary) is done when a row of the step needs it: two
conditionals, which on a GPU cost one host round trip a step in exchange for a sort of `rows x vocab`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleInputs:
    """Per row `[rows]`, as in `Requests`."""

    temperature: jax.Array  # float32, 0: greedy
    top_k: jax.Array  # int32, 0: all
    top_p: jax.Array  # float32
    min_p: jax.Array  # float32
    seed: jax.Array  # uint32
    position: jax.Array  # int32, of the token to be sampled
    banned: jax.Array  # [rows, K] int32, ids that must not be sampled; an id outside the vocabulary bans nothing


def sample(logits: jax.Array, inputs: SampleInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chooses a token a row.

    Temperature, then min-p, then top-k, then top-p, as vLLM orders them. Ties at a boundary go to the lowest ids.

    Args:
        logits: `[rows, vocab]` float32.

    Returns:
        token `[rows]` int32; its log-probability under `logits` as they are, `[rows]` float32; and whether the row
        could be sampled, `[rows]` bool: not where a logit is NaN or +inf or all are -inf.
    """
    rows, vocab = logits.shape
    # A decoder that computes columns has them still: transposed twice is not transposed at all.
    columns = logits.T
    top = jnp.max(columns, axis=0)

    inside = (inputs.banned >= 0) & (inputs.banned < vocab)
    row = jnp.arange(rows)[:, None]
    allowed = columns.at[jnp.where(inside, inputs.banned, vocab), row].set(-jnp.inf, mode="drop")

    # The maximum is NaN if any logit is; after the bans something must be left to choose.
    best, greedy = _argmax(allowed)
    healthy = jnp.isfinite(top) & jnp.isfinite(best)
    token = jax.lax.cond(
        jnp.any(inputs.temperature > 0),
        lambda: jnp.where(inputs.temperature > 0, _draw(allowed.T, inputs), greedy),
        lambda: greedy,
    )
    chosen = jnp.take_along_axis(columns, token[None], axis=0)[0]
    logprob = chosen - top - jnp.log(jnp.sum(jnp.exp(columns - top), axis=0))
    return token, logprob, healthy


def candidates(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` most probable tokens `[rows, count]` int32 of logits `[rows, vocab]`, of equal ones the lowest ids
    first, and their log-probabilities `[rows, count]` float32."""
    if count == 0:
        empty = jnp.zeros((logits.shape[0], 0), jnp.float32)
        return empty.astype(jnp.int32), empty
    logprobs, tokens = jax.lax.top_k(jax.nn.log_softmax(logits, axis=-1), count)
    return tokens, logprobs


def _draw(logits: jax.Array, inputs: SampleInputs) -> jax.Array:
    vocab = logits.shape[1]
    # The largest becomes 0 before the division, so that no temperature overflows.
    temperature = jnp.where(inputs.temperature > 0, inputs.temperature, 1)
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[:, None]
    scaled = jnp.where(scaled >= jnp.log(inputs.min_p)[:, None], scaled, -jnp.inf)

    top_k = jnp.where((inputs.top_k > 0) & (inputs.top_k < vocab), inputs.top_k, vocab)
    truncated = ((top_k < vocab) | (inputs.top_p < 1)) & (inputs.temperature > 0)
    scaled = jax.lax.cond(
        jnp.any(truncated),
        lambda: jnp.where(truncated[:, None], _truncate(scaled, top_k, inputs.top_p), scaled),
        lambda: scaled,
    )

    def noise(seed, position):
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocab,), jnp.float32)

    noisy = (scaled + jax.vmap(noise)(inputs.seed, inputs.position)).T
    return _argmax(noisy)[1]


def _argmax(columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The maximum `[rows]` of each column of `[vocab, rows]`, and the lowest id that has it; NaN and some id where
    there is a NaN. XLA on a CPU does not vectorise `argmax`, so it is looked for by value: first the block of ids,
    then in the block. All of `columns` is read once, for the maxima of the blocks."""
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
    return jnp.min(jnp.where(columns == value, ids, columns.shape[0] - 1), axis=0)


def _truncate(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """-inf outside the `top_k` largest and, among those, the fewest whose probability reaches `top_p`."""
    vocab = scaled.shape[1]
    ids = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), scaled.shape)
    # Stable, so that equal logits stand in the order of their ids.
    negative, sorted_ids = jax.lax.sort((-scaled, ids), dimension=1, num_keys=1, is_stable=True)
    rank = jnp.arange(vocab, dtype=jnp.int32)
    probability = jax.nn.softmax(jnp.where(rank < top_k[:, None], -negative, -jnp.inf), axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    count = jnp.sum((before < top_p[:, None]) & (rank < top_k[:, None]), axis=-1, keepdims=True)
    # The last one that is kept marks the boundary, by value and among equals by id.
    edge = -jnp.take_along_axis(negative, count - 1, axis=-1)
    edge_id = jnp.take_along_axis(sorted_ids, count - 1, axis=-1)
    kept = (scaled > edge) | ((scaled == edge) & (ids <= edge_id))
    return jnp.where(kept, scaled, -jnp.inf)
