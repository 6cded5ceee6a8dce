"""The weights of a decoder, each declared once: its name, its shape, what its axes are, and how it is packed.

What loads, shards, counts and saves weights reads this table. What a checkpoint calls the stored tensors is said by
role, in the family's file. Every matrix is `[out, in]`:

    embed                   [vocab, hidden]
    layers.{i}.attn_norm    [hidden]
    layers.{i}.qkv          [kv_heads, group + 2, head_dim, hidden]   queries of a KV head, its key, its value
    layers.{i}.o            [hidden, heads * head_dim]
    layers.{i}.mlp_norm     [hidden]
    layers.{i}.gate_up      [2, intermediate, hidden]
    layers.{i}.down         [hidden, intermediate]
    final_norm              [hidden]
    head                    [vocab, hidden]                           only where the embedding is not reused
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # a ModelConfig counts its weights by this table
    from jpaged.models.spec import LayerSpec, ModelConfig


@dataclass(frozen=True)
class Part:
    """A stored tensor that fills a weight, or some rows of it.

    Attributes:
        role: what the tensor is, by the word under which a family's table has its name.
        shape: as it is stored.
        at: which rows of the weight it fills, as an index of the weight's leading axes; `()`: all of them.
        rotated: its rows are heads that are rotated by position, which some formats store in another order.
    """

    role: str
    shape: tuple[int, ...]
    at: tuple[Any, ...] = ()
    rotated: bool = False


@dataclass(frozen=True)
class Weight:
    """A weight, declared once.

    Attributes:
        shape: the last axis of a matrix is the one that is multiplied with.
        axes: what each axis is, for sharding; None: nothing that is ever split.
        parts: the stored tensors that it is packed from.
        layer: the layer that it belongs to; None: to the model.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    parts: tuple[Part, ...]
    layer: int | None = None

    @property
    def path(self) -> str:
        """Its name among all weights: "embed", "layers.0.qkv"."""
        return self.name if self.layer is None else f"layers.{self.layer}.{self.name}"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def rows(self, part: Part, *, interleaved: bool) -> np.ndarray:
        """Where the rows of `part` go: for each of them, the number of a row of this weight. A row is what the last
        axis holds; of a weight with one axis, an element.

        Args:
            interleaved: heads that are rotated are stored as llama.cpp stores them, the two features of a rotated pair
                beside each other and not half a head apart.
        """
        leading = self.shape[:-1] if len(self.shape) > 1 else self.shape
        rows = np.arange(math.prod(leading)).reshape(leading)[part.at]
        if interleaved and part.rotated:
            *heads, dim = rows.shape
            rows = rows.reshape(*heads, 2, dim // 2).swapaxes(-1, -2)
        return rows.reshape(-1)


def layer_weights(config: ModelConfig, spec: LayerSpec, layer: int) -> tuple[Weight, ...]:
    """The weights of layer number `layer`. `qkv` holds, for each KV head, its query heads, then its key, then its
    value, so that splitting over KV heads splits all three."""
    hidden, inner, dim = config.hidden_size, spec.intermediate_size, config.head_dim
    heads, kv, group = config.num_heads * dim, config.num_kv_heads, config.group
    qkv = (
        Part("q", (heads, hidden), np.s_[:, :group], rotated=True),
        Part("k", (kv * dim, hidden), np.s_[:, group], rotated=True),
        Part("v", (kv * dim, hidden), np.s_[:, group + 1]),
    )
    gate_up = (Part("gate", (inner, hidden), np.s_[0,]), Part("up", (inner, hidden), np.s_[1,]))
    return (
        _whole("attn_norm", (hidden,), (None,), layer),
        Weight("qkv", (kv, group + 2, dim, hidden), ("kv_heads", None, None, "hidden"), qkv, layer),
        _whole("o", (hidden, heads), ("hidden", "heads"), layer),
        _whole("mlp_norm", (hidden,), (None,), layer),
        Weight("gate_up", (2, inner, hidden), (None, "inner", "hidden"), gate_up, layer),
        _whole("down", (hidden, inner), ("hidden", "inner"), layer),
    )


def outer_weights(config: ModelConfig) -> tuple[Weight, ...]:
    """The weights outside the layers. A tied model has no `head`: the embedding is used."""
    table, axes = (config.vocab_size, config.hidden_size), ("vocab", "hidden")
    weights = (_whole("embed", table, axes), _whole("final_norm", (config.hidden_size,), (None,)))
    return weights if config.tie_word_embeddings else (*weights, _whole("head", table, axes))


def declared(config: ModelConfig) -> dict[str, Weight]:
    """Every weight of a model by its path."""
    weights = [*outer_weights(config)]
    for layer, spec in enumerate(config.layers):
        weights += layer_weights(config, spec, layer)
    return {weight.path: weight for weight in weights}


def num_parameters(config: ModelConfig) -> int:
    """Elements of all weights together."""
    return sum(weight.size for weight in declared(config).values())


def _whole(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], layer: int | None = None) -> Weight:
    """A weight that is stored as one tensor, under its own name as the role."""
    return Weight(name, shape, axes, (Part(name, shape),), layer)
