"""A decoder, put together from the specification of its layers: its modules, and its weights on their devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jpaged.models.attention import attend, places
from jpaged.models.layers import rms_norm, rope_frequencies, rope_tables
from jpaged.models.linear import embedding, linear
from jpaged.models.spec import LayerSpec, ModelConfig, Rope
from jpaged.models.weights import Weight, declared, layer_weights, outer_weights
from jpaged.parallel.rules import brought_together, weight_sharding
from jpaged.pool import KVPool, StepBatch


class LayerNumber(nnx.Variable):
    """Which layer a block is. An array, not a constant, so that the layers are one program many times over, and XLA
    compiles its kernels once for all of them."""


class Block(nnx.Module):
    """A layer: attention and a gated MLP, each after a norm and added to its input."""

    attn_norm: nnx.Param
    qkv: nnx.Param
    o: nnx.Param
    mlp_norm: nnx.Param
    gate_up: nnx.Param
    down: nnx.Param

    def __init__(self, config: ModelConfig, number: int, value: Callable[[Weight], Any], number_value: Any):
        self.config, self.spec = config, config.layers[number]
        self.number = LayerNumber(number_value)
        for weight in layer_weights(config, self.spec, number):
            setattr(self, weight.name, nnx.Param(value(weight), axes=weight.axes))

    def __call__(self, x, pool, batch, rope, place):
        """`x` `[hidden, tokens]` through the layer; returns it and the pool."""
        config: ModelConfig = self.config
        spec: LayerSpec = self.spec
        normed = rms_norm(x, self.attn_norm[...], config.rms_norm_eps)
        qkv = linear(self.qkv[...], normed)
        qkv = qkv.reshape(config.num_kv_heads, config.group + 2, config.head_dim, -1)
        out, pool = attend(qkv, rope, pool, self.number[...], batch, place, spec)
        x = x + linear(self.o[...], out)
        normed = rms_norm(x, self.mlp_norm[...], config.rms_norm_eps)
        gate, up = jnp.split(linear(self.gate_up[...], normed), 2)
        return x + linear(self.down[...], jax.nn.silu(gate) * up), pool


class Layers(nnx.Module):
    """The whole model. Layers are unrolled: where they are scanned, XLA, for CPUs and GPUs alike, copies each layer's
    slice of the stacked weights before it multiplies with it.

    Args:
        value: gives each weight's value, an array or its shape and dtype.
    """

    embed: nnx.Param
    final_norm: nnx.Param
    head: nnx.Param

    def __init__(self, config: ModelConfig, value: Callable[[Weight], Any], number: Callable[[int], Any]):
        self.config = config
        for weight in outer_weights(config):
            setattr(self, weight.name, nnx.Param(value(weight), axes=weight.axes))
        self.layers = nnx.List([Block(config, layer, value, number(layer)) for layer in range(config.num_layers)])

    def __call__(self, pool: KVPool, batch: StepBatch) -> tuple[jax.Array, KVPool]:
        """Float32 logits `[rows, vocab]` of the tokens `batch.logit_index`, and the pool."""
        config: ModelConfig = self.config
        x = embedding(self.embed[...], batch.token_ids)
        ropes: dict[Rope, tuple[jax.Array, jax.Array]] = {}
        for rope in dict.fromkeys(spec.rope for spec in config.layers):
            ropes[rope] = rope_tables(rope_frequencies(rope, config.head_dim), batch.positions)
        place = places(batch, pool.page_size)
        for block in self.layers:
            x, pool = block(x, pool, batch, ropes[block.spec.rope], place)
        x = rms_norm(x[:, batch.logit_index], self.final_norm[...], config.rms_norm_eps)
        head = self.embed if config.tie_word_embeddings else self.head
        logits = brought_together(linear(head[...], x, jnp.float32))
        return logits.T, pool


@dataclass(frozen=True)
class ModelDecoder:
    """The static half of a model; `params` is the other half. Hashable, for `jax.jit`."""

    config: ModelConfig
    graph: nnx.GraphDef

    def __call__(self, params: nnx.State, pool: KVPool, batch: StepBatch) -> tuple[jax.Array, KVPool]:
        """See `jpaged.pool.Decoder`."""
        return nnx.merge(self.graph, params)(pool, batch)


def abstract_decoder(config: ModelConfig, dtype: Any) -> tuple[ModelDecoder, nnx.State]:
    """The decoder with `jax.ShapeDtypeStruct`s for parameters: nothing is allocated."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return _split(config, lambda weight: jax.ShapeDtypeStruct(weight.shape, dtype), lambda _: number)


def load_decoder(
    config: ModelConfig, named: Iterable[tuple[str, np.ndarray]], dtype: Any, mesh: Mesh | None = None
) -> tuple[ModelDecoder, nnx.State]:
    """A decoder with the weights of `named`. Each is on its devices before the next is asked for, and is not kept on
    the host: what the host holds at a time is one of them.

    Args:
        named: (path, array) for every weight of `weights.declared`, in any order.
        dtype: of the parameters; an array of another one is cast.
        mesh: split over it, as `jpaged.parallel.rules` says; None: on JAX's default device.

    Raises:
        ValueError: for a name that is unknown, missing or given twice, or an array of another shape.
    """
    weights, arrays = declared(config), dict[str, jax.Array]()
    for name, array in named:
        _check(weights, name, array, arrays)
        arrays[name] = _placed(array, dtype, None if mesh is None else weight_sharding(mesh, weights[name].axes))
        del array  # or it would live until the next one has been read
    _check_all(weights, arrays)
    return _split(config, lambda weight: arrays.pop(weight.path), jnp.int32)


def replace_weights(params: nnx.State, config: ModelConfig, named: Iterable[tuple[str, np.ndarray]]) -> nnx.State:
    """Parameters with the weights of `named` in place of those of `params`, in the same dtypes and on the same devices.
    A weight of `params` is deleted as soon as the one that follows it has been read; so two of the same name are never
    on a device together.

    Args:
        params: of `load_decoder`. Parameters that were deleted before, by a call that failed, are taken as well.
        named: as for `load_decoder`.

    Raises:
        ValueError: as for `load_decoder`. Some weights of `params` are deleted then, and those that were replaced are
            lost: no whole model is left.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    weights, old = declared(config), {_path(path): leaf for path, leaf in leaves}
    new = {name: leaf for name, leaf in old.items() if name not in weights}  # numbers of layers
    for name, array in named:
        _check(weights, name, array, new)
        was = old[name]
        if not was.is_deleted():
            was.delete()
        new[name] = _placed(array, was.dtype, was.sharding if was.committed else None)
        del array
    _check_all(weights, new)
    return jax.tree.unflatten(tree, [new[name] for name in old])


def _check(weights: dict[str, Weight], name: str, array: np.ndarray, seen: dict[str, Any]) -> None:
    if name not in weights or name in seen:
        raise ValueError(f"parameter {name!r} is {'given twice' if name in seen else 'unknown'}")
    if array.shape != weights[name].shape:
        raise ValueError(f"parameter {name!r} has shape {array.shape}, but the model needs {weights[name].shape}")


def _check_all(weights: dict[str, Weight], seen: dict[str, Any]) -> None:
    if missing := sorted(weights.keys() - seen.keys()):
        raise ValueError(f"parameters are missing: {', '.join(missing[:5])} ({len(missing)} in all)")


def _placed(array: np.ndarray, dtype: Any, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """`array` on its devices, when it is there: until then its bytes on the host are in use. On a CPU they are the
    parameter's, where they are aligned."""
    if array.dtype != dtype:
        array = array.astype(dtype)
    return jax.block_until_ready(jax.device_put(array, sharding))


def _split(config: ModelConfig, value: Callable[[Weight], Any], number: Callable[[int], Any]):
    graph, params = nnx.split(Layers(config, value, number))
    return ModelDecoder(config, graph), params


def _path(path: Any) -> str:
    """The path of a weight from that of a leaf of parameters, whose last entry is the array within its variable."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", None))) for key in path[:-1])
