"""The Llama family: Llama 2 and 3, SmolLM2, Mistral. Grouped, multi- or single-head keys; tied or untied heads."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.models.layers import rms_norm, rope_frequencies, rope_tables, rotate
from jpaged.models.spec import ModelConfig
from jpaged.parallel.rules import BY_HEAD, EVERYWHERE, POOL, brought_together, over_kv_heads
from jpaged.pool import SCRATCH_PAGE, KVPool, StepBatch
from pallas_kernels import kv_write, paged_attention


@dataclass(frozen=True)
class WeightSpec:
    """A weight, declared once: its shape and what its dimensions are, for loading and for sharding."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def block_weights(config: ModelConfig) -> dict[str, WeightSpec]:
    """The weights of one layer. `qkv` holds, for each KV head, its query heads, then its key, then its value, so that
    splitting over KV heads splits all three; `gate_up` holds the gate and the up projection."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "attn_norm": WeightSpec((hidden,), (None,)),
        "qkv": WeightSpec(
            (config.num_kv_heads, config.group + 2, config.head_dim, hidden), ("kv_heads", None, None, "hidden")
        ),
        "o": WeightSpec((hidden, config.num_heads * config.head_dim), ("hidden", "heads")),
        "mlp_norm": WeightSpec((hidden,), (None,)),
        "gate_up": WeightSpec((2, inner, hidden), (None, "inner", "hidden")),
        "down": WeightSpec((hidden, inner), ("hidden", "inner")),
    }


def outer_weights(config: ModelConfig) -> dict[str, WeightSpec]:
    """The weights outside the layers. A tied model has no `head`: the embedding is used."""
    table = WeightSpec((config.vocab_size, config.hidden_size), ("vocab", "hidden"))
    weights = {"embed": table, "final_norm": WeightSpec((config.hidden_size,), (None,))}
    return weights if config.tie_word_embeddings else weights | {"head": table}


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter by its name in checkpoints of ours: `embed`, `layers.0.qkv`, ..."""
    shapes = {name: spec.shape for name, spec in outer_weights(config).items()}
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{name}": spec.shape for name, spec in block_weights(config).items()}
    return shapes


def _param(spec: WeightSpec, dtype: Any, rngs: nnx.Rngs, layers: int | None = None) -> nnx.Param:
    shape, axes = spec.shape, spec.axes
    if layers is not None:
        shape, axes = (layers, *shape), ("layers", *axes)
    if len(spec.shape) == 1:
        value = jnp.ones(shape, dtype)
    else:
        value = 0.02 * jax.random.normal(rngs.params(), shape, jnp.float32).astype(dtype)
    return nnx.Param(value, axes=axes)


class LayerNumber(nnx.Variable):
    """Which layer a block is. An array, not a constant, so that the layers are one program many times over, and XLA
    compiles its kernels once for all of them."""


class Block(nnx.Module):
    """Layer number `number`; or with `layers` all of them, stacked along a first axis for a scan."""

    attn_norm: nnx.Param
    qkv: nnx.Param
    o: nnx.Param
    mlp_norm: nnx.Param
    gate_up: nnx.Param
    down: nnx.Param

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs, number: int = 0, layers: int | None = None):
        self.config = config
        self.number = LayerNumber(jnp.int32(number) if layers is None else jnp.arange(layers, dtype=jnp.int32))
        for name, spec in block_weights(config).items():
            setattr(self, name, _param(spec, dtype, rngs, layers))

    def __call__(self, x, pool, batch, rope, place):
        """`x` `[hidden, tokens]` through the layer; returns it and the pool."""
        x, pool = self.attend(x, pool, batch, rope, place)
        return x + self.mlp(rms_norm(x, self.mlp_norm[...], self.config.rms_norm_eps)), pool

    def attend(self, x, pool, batch, rope, place):
        config, tokens, layer = self.config, x.shape[1], self.number[...]
        normed = rms_norm(x, self.attn_norm[...], config.rms_norm_eps)
        qkv = self.qkv[...].reshape(-1, config.hidden_size) @ normed
        qkv = qkv.reshape(config.num_kv_heads, config.group + 2, config.head_dim, tokens)
        turned = rotate(qkv[:, :-1], *rope)  # queries and keys
        q = turned[:, :-1].transpose(3, 0, 1, 2).reshape(tokens, config.num_heads, config.head_dim)
        k, v = (a.transpose(2, 0, 1).astype(pool.k.dtype) for a in (turned[:, -1], qkv[:, -1]))

        def write_and_attend(q, k, v, pool, layer, batch, place):
            pool = KVPool(*kv_write(pool.k, pool.v, k, v, layer, *place))
            out = paged_attention(
                q, pool.k, pool.v, layer, batch.page_table, batch.query_start, batch.kv_len,
                scale=1 / math.sqrt(config.head_dim), sliding_window=config.sliding_window,
            )  # fmt: skip
            return out, pool

        split = over_kv_heads(
            write_and_attend, (BY_HEAD, BY_HEAD, BY_HEAD, POOL, EVERYWHERE, EVERYWHERE, EVERYWHERE), (BY_HEAD, POOL)
        )
        out, pool = split(q, k, v, pool, layer, batch, place)
        return x + self.o[...] @ out.reshape(tokens, -1).T, pool

    def mlp(self, x):
        gate, up = jnp.split(self.gate_up[...].reshape(-1, self.config.hidden_size) @ x, 2)
        return self.down[...] @ (jax.nn.silu(gate) * up)


class Llama(nnx.Module):
    """A decoder of the Llama family.

    Args:
        stacked: layers are one Block with stacked weights, scanned: one layer is compiled, in half the time or less.
            Otherwise they are a list, unrolled: XLA, for CPUs and GPUs alike, would copy each layer's slice of a stack
            before multiplying with it.
    """

    embed: nnx.Param
    final_norm: nnx.Param
    head: nnx.Param
    layers: Any  # a stacked Block, or a list of them

    def __init__(self, config: ModelConfig, *, dtype: Any = jnp.float32, stacked: bool = False, rngs: nnx.Rngs):
        self.config = config
        self.stacked = stacked
        for name, spec in outer_weights(config).items():
            setattr(self, name, _param(spec, dtype, rngs))
        if stacked:
            self.layers = Block(config, dtype, rngs, layers=config.num_layers)
        else:
            self.layers = nnx.List([Block(config, dtype, rngs, number) for number in range(config.num_layers)])

    def __call__(self, pool: KVPool, batch: StepBatch) -> tuple[jax.Array, KVPool]:
        """Float32 logits `[rows, vocab]` of the tokens `batch.logit_index`, and the pool."""
        config = self.config
        x = self.embed[...][batch.token_ids].T
        rope = rope_tables(rope_frequencies(config), batch.positions)
        place = _places(batch, pool.page_size)
        if self.stacked:
            graph, weights = nnx.split(self.layers)

            def layer(carry, weights):
                return nnx.merge(graph, weights)(*carry, batch, rope, place), None

            (x, pool), _ = jax.lax.scan(layer, (x, pool), weights)
        else:
            for block in self.layers:
                x, pool = block(x, pool, batch, rope, place)
        x = rms_norm(x[:, batch.logit_index], self.final_norm[...], config.rms_norm_eps)
        head = self.embed if config.tie_word_embeddings else self.head
        logits = brought_together(jnp.matmul(head[...], x, preferred_element_type=jnp.float32))
        return logits.T, pool


def _places(batch: StepBatch, page_size: int) -> tuple[jax.Array, jax.Array]:
    """Page and offset `[tokens]` where each token's key and value go."""
    padding = batch.token_row == batch.num_rows
    row = jnp.minimum(batch.token_row, batch.num_rows - 1)
    page = batch.page_table[row, batch.positions // page_size]
    return jnp.where(padding, SCRATCH_PAGE, page), batch.positions % page_size


@dataclass(frozen=True)
class LlamaDecoder:
    """The static half of a split Llama; `params` is the other half. Hashable, for `jax.jit`."""

    config: ModelConfig
    graph: nnx.GraphDef

    def __call__(self, params: nnx.State, pool: KVPool, batch: StepBatch) -> tuple[jax.Array, KVPool]:
        return nnx.merge(self.graph, params)(pool, batch)


def split(model: Llama) -> tuple[LlamaDecoder, nnx.State]:
    """A model as its static definition and its parameter pytree."""
    graph, params = nnx.split(model)
    return LlamaDecoder(model.config, graph), params


def abstract_decoder(config: ModelConfig, dtype: Any, *, stacked: bool) -> tuple[LlamaDecoder, nnx.State]:
    """The decoder with `jax.ShapeDtypeStruct`s for parameters: nothing is allocated."""
    return split(nnx.eval_shape(lambda: Llama(config, dtype=dtype, stacked=stacked, rngs=nnx.Rngs(0))))


def load_decoder(
    config: ModelConfig, named: Iterable[tuple[str, np.ndarray]], dtype: Any, *, stacked: bool = False
) -> tuple[LlamaDecoder, nnx.State]:
    """A decoder with the parameters of `named`: (name, array) for every name of `parameter_shapes`, in any order.

    Args:
        stacked: see `Llama`.

    Raises:
        ValueError: for a name that is unknown, missing or given twice, or an array of another shape.
    """
    decoder, abstract = abstract_decoder(config, dtype, stacked=stacked)
    shapes = parameter_shapes(config)
    stacks: dict[str, np.ndarray] = {}
    leaves: dict[tuple, jax.Array] = {}
    seen: set[str] = set()
    for name, array in named:
        if name not in shapes or name in seen:
            raise ValueError(f"parameter {name!r} is {'given twice' if name in seen else 'unknown'}")
        if array.shape != shapes[name]:
            raise ValueError(f"parameter {name!r} has shape {array.shape}, but the model needs {shapes[name]}")
        seen.add(name)
        if not name.startswith("layers."):
            leaves[(name,)] = jnp.asarray(array, dtype)
            continue
        _, index, kind = name.split(".")
        if not stacked:
            leaves[("layers", int(index), kind)] = jnp.asarray(array, dtype)
            continue
        stack = stacks.setdefault(kind, np.empty((config.num_layers, *array.shape), dtype))
        stack[int(index)] = array
    if missing := sorted(set(shapes) - seen):
        raise ValueError(f"parameters are missing: {', '.join(missing[:5])} ({len(missing)} in all)")
    leaves |= {("layers", kind): jnp.asarray(stack) for kind, stack in stacks.items()}
    if stacked:
        leaves["layers", "number"] = jnp.arange(config.num_layers, dtype=jnp.int32)
    else:
        leaves |= {("layers", layer, "number"): jnp.int32(layer) for layer in range(config.num_layers)}

    def fill(path, _):
        return leaves[tuple(getattr(k, "key", getattr(k, "idx", None)) for k in path if not _is_value_key(k))]

    return decoder, jax.tree_util.tree_map_with_path(fill, abstract)


def _is_value_key(key: Any) -> bool:
    """Whether a path entry is the one inside an nnx variable rather than a name of the model."""
    return isinstance(key, jax.tree_util.GetAttrKey)
