"""What a decoder-only model is, independent of the file it came from."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context a model was trained on.

    `kind` is `"linear"` (every frequency divided by `factor`) or `"llama3"` (Llama 3.1: low frequencies
    divided by `factor`, high ones kept, a smooth passage between the two). The last three fields are read
    by `"llama3"` only.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    KINDS = ("linear", "llama3")

    def __post_init__(self):
        if self.kind not in self.KINDS:
            raise ValueError(f"rope scaling kind {self.kind!r} is not supported; supported: {self.KINDS}")
        if not self.factor >= 1.0:
            raise ValueError(f"rope scaling factor must be at least 1, got {self.factor}")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            raise ValueError(
                "llama3 rope scaling needs high_freq_factor > low_freq_factor > 0, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one decoder-only model. Lengths are in tokens, sizes in elements."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_scaling: RopeScaling | None = None
    #: rotary frequency i is divided by entry i; head_dim / 2 of them. GGUF stores Llama 3.1's scaling so; it
    #: takes the place of `rope_scaling`
    rope_freq_factors: tuple[float, ...] | None = None
    #: a query sees the last `sliding_window` tokens, itself included; None: all of them
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        sizes = (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
            "head_dim", "max_position_embeddings",
        )  # fmt: skip
        for name in sizes:
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.rope_freq_factors is not None:
            factors = self.rope_freq_factors
            if len(factors) != self.head_dim // 2 or not all(0 < factor < math.inf for factor in factors):
                allowed = f"{self.head_dim // 2} positive numbers (head_dim / 2)"
                raise ValueError(f"rope_freq_factors must be {allowed}, got {factors}")
            if self.rope_scaling is not None:
                raise ValueError("give rope_scaling or rope_freq_factors, not both")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1 or None, got {self.sliding_window}")
        ids = (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,)))
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"special token id {token} lies outside the vocabulary of {self.vocab_size}")

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        attention = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.hidden_size
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        tables = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return tables + self.num_layers * layer + self.hidden_size
