"""How long a case of `paged_attention` takes on this machine's device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.cases import SPARE_PAGES, Case, integers


def seconds(function: Callable[[], Any], *, at_least: float = 0.2) -> float:
    """Of one call: the median of five batches of calls, each waited for once, after two calls that do not count."""
    for _ in range(2):
        jax.block_until_ready(function())
    start = time.perf_counter()
    jax.block_until_ready(function())
    calls = max(1, int(at_least / 5 / max(time.perf_counter() - start, 1e-6)))
    batches = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            result = function()
        jax.block_until_ready(result)
        batches.append((time.perf_counter() - start) / calls)
    return statistics.median(batches)


def seconds_of(case: Case, attend: Callable[..., Any]) -> float:
    """Seconds of one call of `attend`, which takes what `paged_attention` takes, in bfloat16.

    From a program that attends in several layers one after the other: what lies in the caches is another layer's, and
    launching is not measured.
    """
    layers = 2 if case.bytes_moved(2) > 1 << 31 else 4
    shape = (layers, case.pages_used + SPARE_PAGES, case.kv_heads, case.page_size, case.head_dim)
    keys = jax.random.split(jax.random.key(0), 3)
    k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:2])
    queries = jax.random.normal(keys[2], (case.num_tokens, case.heads, case.head_dim), jnp.bfloat16)

    @jax.jit
    def all_layers(queries, k, v, *batch):
        def layer(queries, number):
            return attend(queries, k, v, number, *batch, **case.options), None

        return jax.lax.scan(layer, queries, jnp.arange(layers, dtype=jnp.int32))[0]

    batch = integers(case)
    return seconds(lambda: all_layers(queries, k, v, *batch)) / layers
