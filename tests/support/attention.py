"""Operands of `paged_attention` for a case, with poison where nothing may be read, and its results in numpy."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.cases import Case

LAYERS, LAYER = 2, 1
POISON = (np.nan, np.inf, -np.inf)


def inputs(case: Case, seed: int = 0, dtype=np.float32):
    """Arguments of `paged_attention`: pages in a mixed order, and poison wherever no token of a row lies: in the
    ends of last pages, in pages that are free, in the other layer, in the scratch page."""
    rng = np.random.default_rng(seed)
    total = case.pages_used + 3
    shape = (LAYERS, total, case.kv_heads, case.page_size, case.head_dim)
    k, v = (rng.choice(POISON, shape).astype(np.float32) for _ in range(2))
    order = (1 + rng.permutation(total - 1)).tolist()
    table = np.zeros((len(case.rows), case.max_pages), np.int32)
    for row, (_, tokens) in enumerate(case.rows):
        for column in range(-(-tokens // case.page_size)):
            page = table[row, column] = order.pop()
            filled = min(case.page_size, tokens - column * case.page_size)
            for pool in (k, v):
                pool[LAYER, page, :, :filled] = rng.normal(size=(case.kv_heads, filled, case.head_dim))
    queries = rng.normal(size=(case.num_tokens, case.heads, case.head_dim))
    start = np.cumsum([0, *(queries for queries, _ in case.rows)]).astype(np.int32)
    lengths = np.array([tokens for _, tokens in case.rows], np.int32)
    floats = (jnp.asarray(a, dtype) for a in (queries, k, v))
    return (*floats, LAYER, jnp.asarray(table), jnp.asarray(start), jnp.asarray(lengths))


def options(case: Case) -> dict:
    return {
        "scale": 1 / math.sqrt(case.head_dim), "sliding_window": case.sliding_window, "soft_cap": case.soft_cap
    }  # fmt: skip


def in_numpy(case: Case, queries, k, v, layer, table, start, lengths, *, return_lse=False):
    """Row by row and query by query, in float64, without masks: only what is visible is read. With the log-sum-exps,
    if they are asked for."""
    queries, k, v = (np.asarray(a, np.float64) for a in (queries, k, v))
    out, lse = np.zeros_like(queries), np.full(queries.shape[:2], -np.inf)
    for row, (count, tokens) in enumerate(case.rows):
        pages = np.asarray(table)[row, : -(-tokens // case.page_size)]
        keys, values = (a[layer, pages].transpose(1, 0, 2, 3).reshape(case.kv_heads, -1, case.head_dim) for a in (k, v))
        for index in range(count):
            position = tokens - count + index
            first = 0 if case.sliding_window is None else max(0, position - case.sliding_window + 1)
            for head in range(case.heads):
                kv_head = head // (case.heads // case.kv_heads)
                query = queries[start[row] + index, head]
                scores = keys[kv_head, first : position + 1] @ query / math.sqrt(case.head_dim)
                if case.soft_cap is not None:
                    scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                weights = np.exp(scores - scores.max())
                lse[start[row] + index, head] = scores.max() + np.log(weights.sum())
                values_seen = values[kv_head, first : position + 1]
                out[start[row] + index, head] = weights @ values_seen / weights.sum()
    return (out, lse) if return_lse else out
