"""How fast a step could be: the time of nothing but the products with the weights.

A breakdown compares this with the wall time of a run. What is left is everything else: attention, norms,
sampling, scheduling, and the host between two bursts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jpaged.bench.measure import StepSample
from jpaged.models.config import ModelConfig


@dataclass(frozen=True)
class Breakdown:
    """Where the wall time of a run went."""

    wall_s: float
    products_s: float
    steps_by_budget: dict[int, int]
    product_s_by_budget: dict[int, float]  # seconds of the products of one step

    @property
    def products_share(self) -> float:
        return self.products_s / self.wall_s

    @property
    def other_share(self) -> float:
        """Share of the wall time outside the products; below 0 where the engine's are faster than these."""
        return 1 - self.products_share

    def to_json(self) -> dict:
        return {
            "wall_s": self.wall_s,
            "products_s": self.products_s,
            "products_share": self.products_share,
            "other_share": self.other_share,
            "steps_by_budget": {str(k): v for k, v in self.steps_by_budget.items()},
            "product_s_by_budget": {str(k): v for k, v in self.product_s_by_budget.items()},
        }


def make_weights(model: ModelConfig, dtype: str) -> list[tuple[jax.Array, ...]]:
    """Weights of the right shapes `[out, in]`: per layer qkv, o, gate and up, down; last the head.

    Each is its own buffer, so that they stream from memory as real ones do. They are filled with `1 / in`,
    which keeps a vector of ones as it is, however many layers there are.
    """

    def weight(out: int, inner: int) -> jax.Array:
        return jnp.full((out, inner), 1 / inner, dtype)

    hidden, attended = model.hidden_size, model.num_heads * model.head_dim
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    layers: list[tuple[jax.Array, ...]] = [
        (
            weight(qkv, hidden),
            weight(hidden, attended),
            weight(2 * model.intermediate_size, hidden),
            weight(hidden, model.intermediate_size),
        )
        for _ in range(model.num_layers)
    ]
    return [*layers, (weight(model.vocab_size, hidden),)]


def product_chain(model: ModelConfig, rows: int):
    """The products of one step, a function of `(weights, x[hidden, tokens])`; the head takes `rows` columns.

    Slices take the place of attention and of the gate: they feed each product with data of the right shape
    from the one before it, so that none can be dropped or run ahead.
    """

    def chain(weights, x):
        *layers, (head,) = weights
        for qkv, o, gate_up, down in layers:
            attended = (qkv @ x)[: model.num_heads * model.head_dim]
            gated = (gate_up @ (o @ attended))[: model.intermediate_size]
            x = down @ gated
        return head @ x[:, :rows]

    return chain


def time_products(
    model: ModelConfig,
    dtype: str,
    tokens: int,
    *,
    rows: int,
    weights: list[tuple[jax.Array, ...]] | None = None,
    seconds: float = 1.0,
) -> float:
    """Seconds of all products of a step of `tokens` tokens, the head on `min(tokens, rows)` of them.

    The median of runs that take about `seconds` in all, at least three. `weights` are those of
    `make_weights`; give them where several sizes are timed.
    """
    for name, value in (("tokens", tokens), ("rows", rows)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    weights = make_weights(model, dtype) if weights is None else weights
    run = jax.jit(product_chain(model, min(tokens, rows)))
    x = jnp.ones((model.hidden_size, tokens), dtype)
    run(weights, x).block_until_ready()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        start = time.perf_counter()
        run(weights, x).block_until_ready()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def break_down(
    history: Iterable[StepSample],
    *,
    wall_s: float,
    model: ModelConfig,
    dtype: str,
    rows: int,
    seconds: float = 1.0,
) -> Breakdown:
    """Times the products for each budget that the steps of `history` used, and adds them up."""
    steps = dict(sorted(Counter(sample.budget for sample in history).items()))
    weights = make_weights(model, dtype)
    times = {
        budget: time_products(model, dtype, budget, rows=rows, weights=weights, seconds=seconds) for budget in steps
    }
    total = sum(count * times[budget] for budget, count in steps.items())
    return Breakdown(wall_s, total, steps, times)
