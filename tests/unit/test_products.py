"""The products that a breakdown times: their shapes, and how times and steps add up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.bench.measure import StepSample
from jpaged.bench.products import Breakdown, break_down, make_weights, product_chain, time_products
from jpaged.models.config import ModelConfig

TINY = ModelConfig(
    family="llama",
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)


def test_the_weights_are_those_of_the_model():
    weights = make_weights(TINY, "float32")
    shapes = [tuple(w.shape for w in layer) for layer in weights]
    layer = ((32, 16), (16, 16), (48, 16), (16, 24))
    assert shapes == [layer, layer, ((40, 16),)]
    norms = (2 * TINY.num_layers + 1) * TINY.hidden_size
    assert sum(w.size for layer in weights for w in layer) == TINY.num_parameters - norms


def test_the_chain_computes_all_products_and_keeps_ones():
    weights = make_weights(TINY, "float32")
    logits = product_chain(TINY, 3)(weights, jnp.ones((16, 5)))
    assert logits.shape == (40, 3)
    np.testing.assert_allclose(logits, 1.0, rtol=1e-5)
    # every product is in the program: 4 a layer and the head
    jaxpr = jax.make_jaxpr(product_chain(TINY, 3))(weights, jnp.ones((16, 5)))
    assert str(jaxpr).count("dot_general[") == 4 * 2 + 1


def test_times_are_positive_and_sizes_are_checked():
    assert time_products(TINY, "float32", 4, rows=2, seconds=0.0) > 0
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        time_products(TINY, "float32", 0, rows=2)
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        time_products(TINY, "float32", 4, rows=0)


def test_a_breakdown_counts_the_steps_of_each_budget():
    history = [StepSample(i, 1, 0, 1, 1, 1, budget) for i, budget in enumerate([8, 8, 16, 8])]
    found = break_down(history, wall_s=10.0, model=TINY, dtype="float32", rows=4, seconds=0.0)
    assert found.steps_by_budget == {8: 3, 16: 1}
    times = found.product_s_by_budget
    assert found.products_s == pytest.approx(3 * times[8] + times[16])
    assert found.products_share + found.other_share == pytest.approx(1)


def test_a_breakdown_as_json():
    made = Breakdown(10.0, 8.0, {8: 2}, {8: 4.0}).to_json()
    assert made["products_share"] == 0.8
    assert made["other_share"] == pytest.approx(0.2)
    assert made["steps_by_budget"] == {"8": 2}
