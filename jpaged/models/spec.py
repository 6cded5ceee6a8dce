"""What a decoder-only model is, independent of the file it came from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from jpaged.models.weights import num_parameters


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
class Rope:
    """Rotary embedding of the queries and keys of a layer.

    Attributes:
        theta: base of the frequencies.
        scaling: how they are stretched.
        factors: frequency i is divided by entry i, head_dim / 2 of them; in place of `scaling`.
    """

    theta: float
    scaling: RopeScaling | None = None
    factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class LayerSpec:
    """What one layer of a decoder is, beyond the sizes that all layers share.

    Attributes:
        intermediate_size: units of the MLP.
        rope: how queries and keys are rotated.
        attention_scale: multiplies the products of queries and keys.
        sliding_window: how many tokens a query sees, itself included; None: all up to itself.
    """

    intermediate_size: int
    rope: Rope
    attention_scale: float
    sliding_window: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one decoder-only model. Lengths are in tokens, sizes in elements.

    All layers are alike; the configuration of a family in which they differ is a subclass that says so in `layers`.
    """

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

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The specification of each layer, in order."""
        rope = Rope(self.rope_theta, self.rope_scaling, self.rope_freq_factors)
        spec = LayerSpec(self.intermediate_size, rope, 1 / math.sqrt(self.head_dim), self.sliding_window)
        return (spec,) * self.num_layers

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all weights together."""
        return num_parameters(self)
