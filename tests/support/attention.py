"""What a case of `paged_attention` results in, in numpy."""

from __future__ import annotations

import math

import numpy as np

from pallas_kernels.paged_attention.cases import Case


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
