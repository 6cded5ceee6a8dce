"""Decoders without weights. What they emit is simple enough to be predicted in a line of Python."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jpaged.pool import SCRATCH_PAGE, KVPool, StepBatch

#: what `make_state` needs to know of a stub
STUB_SHAPE = {"layers": 1, "kv_heads": 1, "head_dim": 2}


class Traces:
    """Counts how often a decoder was traced. Hashed by identity, so it can stand in a static argument: a decoder that
    is counted shares no program with another. All others of equal fields share theirs."""

    def __init__(self):
        self.count = 0


def prefer(preferred: jax.Array, vocab: int) -> jax.Array:
    """Float32 logits `[rows, vocab]`: the largest at `preferred`, then falling from id to id, around the end."""
    distance = (jnp.arange(vocab, dtype=jnp.int32) - preferred[:, None]) % vocab
    return -distance.astype(jnp.float32)


@dataclass(frozen=True)
class ScriptDecoder:
    """Emits `follow(last token, its position)`; the pool is not touched.

    Args:
        vocab: size of the vocabulary.
        successor: if given, what follows each token, whatever its position. SCRIPT[a, b, ..] of the known-faults
            file is a table with a -> b -> ..
        nan_token: a row whose last token this is gets NaN for logits.
    """

    vocab: int = 32
    successor: tuple[int, ...] | None = None
    nan_token: int = -1
    traces: Traces | None = None

    def follow(self, token, position):
        if self.successor is not None:
            return self.successor[token]
        return (5 * token + 3 * position + 1) % self.vocab

    def __call__(self, params, pool: KVPool, batch: StepBatch) -> tuple[jax.Array, KVPool]:
        if self.traces is not None:
            self.traces.count += 1
        last, position = batch.token_ids[batch.logit_index], batch.positions[batch.logit_index]
        if self.successor is not None:
            following = jnp.asarray(self.successor, jnp.int32)[last]
        else:
            following = self.follow(last, position)
        logits = prefer(following, self.vocab)
        return jnp.where((last == self.nan_token)[:, None], jnp.nan, logits), pool

    def continuation(self, prompt, count: int) -> list[int]:
        """The ids that it emits after `prompt`, greedily."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.follow(tokens[-1], len(tokens) - 1)))
        return tokens[len(prompt) :]


@dataclass(frozen=True)
class HistoryDecoder:
    """Emits a number that depends on every token of the request *as the pool holds it*: each token writes its id and
    its position into its page, and a row reads them back through its page table. A token that is missing, stale,
    misplaced or someone else's changes what is emitted.

    A request with `nan_token` in it has NaN in its page and for logits, as a broken model would.
    """

    vocab: int = 32
    nan_token: int = -1
    traces: Traces | None = None

    def __call__(self, params, pool: KVPool, batch: StepBatch) -> tuple[jax.Array, KVPool]:
        if self.traces is not None:
            self.traces.count += 1
        rows, page_size = batch.num_rows, pool.page_size
        padding = batch.token_row == rows
        table_row = jnp.minimum(batch.token_row, rows - 1)
        page = jnp.where(padding, SCRATCH_PAGE, batch.page_table[table_row, batch.positions // page_size])
        offset = batch.positions % page_size
        token = batch.token_ids.astype(jnp.float32)
        token = jnp.where(batch.token_ids == self.nan_token, jnp.nan, token)
        place = batch.positions.astype(jnp.float32)
        k = pool.k.at[0, page, 0, offset].set(jnp.stack([token, place], axis=-1))
        pool = KVPool(k=k, v=pool.v)

        stored = k[0, batch.page_table, 0].reshape(rows, -1, 2)  # [rows, max_pages * page_size, 2]
        expected = jnp.arange(stored.shape[1], dtype=jnp.int32)
        # Causal, as a model is: a row of padded prompts has tokens after the one whose logits are wanted.
        inside = (expected < batch.kv_len[:, None]) & (expected <= batch.positions[batch.logit_index][:, None])
        wrong = jnp.any(inside & (stored[..., 1] != expected.astype(jnp.float32)), axis=1)
        broken = jnp.any(inside & jnp.isnan(stored[..., 0]), axis=1)
        ids = jnp.where(inside & ~jnp.isnan(stored[..., 0]), stored[..., 0], 0).astype(jnp.int32)
        total = jnp.sum(jnp.where(inside, (ids + 1) * (expected % 7 + 1), 0), axis=1, dtype=jnp.int32)
        following = jnp.where(wrong, 0, 1 + total % (self.vocab - 2))  # 0 is never right
        logits = prefer(following, self.vocab)
        return jnp.where(broken[:, None], jnp.nan, logits), pool

    def following(self, tokens) -> int | None:
        """The id that it prefers after `tokens`; None: NaN."""
        if self.nan_token in tokens:
            return None
        total = sum((token + 1) * (place % 7 + 1) for place, token in enumerate(tokens))
        return 1 + total % (self.vocab - 2)

    def continuation(self, prompt, count: int) -> list[int]:
        """The ids that it emits after `prompt`, greedily; `prompt` is without `nan_token`."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.following(tokens))
        return tokens[len(prompt) :]
