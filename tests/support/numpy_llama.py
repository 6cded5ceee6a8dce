"""The Llama family in numpy, float64, one sequence, whole attention: no pages, no chunks, no JAX. Written from the
published architecture; it shares nothing with `jpaged.models` but the names of the weights."""

from __future__ import annotations

import math

import numpy as np

from jpaged.models.spec import ModelConfig


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Rotary frequencies, one by one, as Llama 3.1's reference code scales them."""
    result = []
    for pair in range(config.head_dim // 2):
        frequency = config.rope_theta ** (-2 * pair / config.head_dim)
        scaling = config.rope_scaling
        if scaling is not None and scaling.kind == "linear":
            frequency /= scaling.factor
        elif scaling is not None:
            wavelength = 2 * math.pi / frequency
            context = scaling.original_max_position_embeddings
            if wavelength > context / scaling.low_freq_factor:
                frequency /= scaling.factor
            elif wavelength >= context / scaling.high_freq_factor:
                smooth = (context / wavelength - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        result.append(frequency)
    return np.array(result)


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def turn(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Rotary embedding of `[tokens, head_dim]`, token `t` at position `t`."""
    half = config.head_dim // 2
    angle = np.arange(len(x))[:, None] * inverse_frequencies(config)
    first, second = x[:, :half], x[:, half:]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=1
    )


def numpy_logits(config: ModelConfig, weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Logits `[tokens, vocab]` after each token."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    group = config.num_heads // config.num_kv_heads
    position = np.arange(len(tokens))
    visible = position[None] <= position[:, None]
    if config.sliding_window is not None:
        visible &= position[None] > position[:, None] - config.sliding_window
    x = w["embed"][tokens]
    for layer in range(config.num_layers):
        here = f"layers.{layer}."
        normed = norm(x, w[here + "attn_norm"], config.rms_norm_eps)
        heads = []
        for kv_head in range(config.num_kv_heads):
            *queries, key, value = w[here + "qkv"][kv_head]  # its query heads, then its key, then its value
            keys, values = turn(normed @ key.T, config), normed @ value.T
            assert len(queries) == group
            for query in queries:
                scores = turn(normed @ query.T, config) @ keys.T / math.sqrt(config.head_dim)
                scores = np.where(visible, scores, -np.inf)
                share = np.exp(scores - scores.max(axis=1, keepdims=True))
                heads.append(share / share.sum(axis=1, keepdims=True) @ values)
        x = x + np.concatenate(heads, axis=1) @ w[here + "o"].T
        normed = norm(x, w[here + "mlp_norm"], config.rms_norm_eps)
        gate, up = normed @ w[here + "gate_up"][0].T, normed @ w[here + "gate_up"][1].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[here + "down"].T
    head = w["embed"] if config.tie_word_embeddings else w["head"]
    return norm(x, w["final_norm"], config.rms_norm_eps) @ head.T


def numpy_greedy(config: ModelConfig, weights: dict[str, np.ndarray], prompt: list[int], count: int) -> list[int]:
    """The ids that the model generates after `prompt`, greedily."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(numpy_logits(config, weights, tokens)[-1])))
    return tokens[len(prompt) :]
