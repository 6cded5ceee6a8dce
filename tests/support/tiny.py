"""TINY: a random decoder small enough for tests, with weights large enough that what it says depends on the input."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.models.decoder import ModelDecoder, load_decoder
from jpaged.models.spec import ModelConfig
from jpaged.models.weights import declared

#: 2 layers, 4 query heads over 2 KV heads of 16, and one token a byte
TINY = ModelConfig(
    family="llama", vocab_size=256, hidden_size=40, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, rms_norm_eps=1e-5, rope_theta=10_000.0, max_position_embeddings=512, tie_word_embeddings=False,
)  # fmt: skip


def tiny_config(**changes: Any) -> ModelConfig:
    """TINY with some fields changed."""
    return replace(TINY, **changes)


def tiny_weights(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights by name, the same for equal `config` and `seed`. Norm weights are not 1, and products
    keep the size of their input, so that a norm, a head or a layer left out changes the logits."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in ((name, weight.shape) for name, weight in declared(config).items()):
        if name.endswith("norm"):
            weights[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        elif name == "embed":
            weights[name] = rng.normal(0, 1, shape).astype(np.float32)
        else:
            weights[name] = rng.normal(0, 1.5 / np.sqrt(shape[-1]), shape).astype(np.float32)
    return weights


@lru_cache(maxsize=32)
def tiny_decoder(
    config: ModelConfig = TINY, *, seed: int = 0, dtype: Any = jnp.float32
) -> tuple[ModelDecoder, nnx.State]:
    """The decoder of `tiny_weights` and its parameters."""
    return load_decoder(config, tiny_weights(config, seed).items(), dtype)
