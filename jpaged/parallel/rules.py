"""Tensor parallelism by KV heads (Shoeybi et al. 2019, Megatron-LM): what of a model each card of a mesh holds.

The projections that make heads and the MLP's inner units are split by what they make, those that consume them by what
they consume, so a layer needs two sums over the cards, which XLA adds. The pool is split by KV heads, and so is
attention: a card never reads another's pages. All that schedules is small and the same on every card.

                   card 0            card 1
    qkv            KV heads 0 .. 3   KV heads 4 .. 7
    pool           KV heads 0 .. 3   KV heads 4 .. 7
    o              its heads' columns; the sum over cards is the result
    gate_up, down  half of the inner units; the sum over cards is the result
    embed, head    half of the vocabulary; logits are brought together for the sampler
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

#: the mesh axis over which a model is split
TENSOR = "tensor"
#: what is split over it, by the names in a weight's `axes`
SPLIT = frozenset({"kv_heads", "heads", "inner", "vocab"})
#: `[layers, pages, kv_heads, page_size, head_dim]`
POOL = PartitionSpec(None, None, TENSOR)
#: `[tokens, heads, head_dim]`
BY_HEAD = PartitionSpec(None, TENSOR)
EVERYWHERE = PartitionSpec()


def weight_sharding(mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
    """How a weight whose axes are called `axes` is split over `mesh`."""
    return NamedSharding(mesh, PartitionSpec(*(TENSOR if axis in SPLIT else None for axis in axes)))


def parameter_shardings(mesh: Mesh, params: nnx.State) -> Any:
    """Shardings of `params`, a tree like theirs: from the axes that each weight was declared with."""

    def sharding(variable: nnx.Variable) -> Any:
        split = weight_sharding(mesh, variable.get_metadata().get("axes", ()))
        return jax.tree.map(lambda _: split, variable)

    return jax.tree.map(sharding, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def state_shardings(mesh: Mesh, state: Any) -> Any:
    """Shardings of an `EngineState`: its pool by KV heads, the rest everywhere."""
    pool = {id(leaf) for leaf in jax.tree.leaves(state.pool)}
    return jax.tree.map(lambda leaf: NamedSharding(mesh, POOL if id(leaf) in pool else EVERYWHERE), state)


def brought_together(array: jax.Array) -> jax.Array:
    """`array`, of which each card made some rows, whole on each of them, where the mesh in use has an axis `TENSOR`.

    Said in two steps: told only that the result is to be whole, XLA would bring the weights together instead.
    """
    if TENSOR not in jax.sharding.get_abstract_mesh().axis_names:
        return array
    array = jax.lax.with_sharding_constraint(array, PartitionSpec(TENSOR))
    return jax.lax.with_sharding_constraint(array, EVERYWHERE)


def over_kv_heads(function: Callable, in_specs: Sequence[Any], out_specs: Any) -> Callable:
    """`function` on each card's heads, where the mesh in use has an axis `TENSOR`; else `function`.

    A Pallas kernel is opaque to XLA, which could not split it by itself.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if TENSOR not in mesh.axis_names:
        return function
    return jax.shard_map(function, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)
