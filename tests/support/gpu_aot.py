"""Compiles a JAX program for described NVIDIA GPUs on a machine that has none.

XLA's CUDA plugin compiles ahead of time for cards it is told about. The result cannot run here, but it shows what
the compiler made of the program: memory, aliased arguments, copies, loops, conditionals, registers. Used in a process
of its own (`tests/gpu/`), where the plugin is installed.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.cards import CARDS

#: Of each card what `pallas_kernels.cards` does not need, from OpenXLA's card specifications: compute capability, lanes
#: a core, bytes of L2, GHz, bytes of memory, bytes of shared memory a core.
_MORE = {
    "a100": (8, 0, 64, 41_943_040, 1.41, 85_100_068_864, 167_936),
    "h100": (9, 0, 128, 52_428_800, 1.98, 84_978_434_048, 233_472),
    "h200": (9, 0, 128, 52_428_800, 1.98, 151_397_597_184, 233_472),
    "b200": (10, 0, 128, 132_644_864, 1.965, 191_514_411_008, 233_472),
}


def describe(name: str) -> str:
    """GpuTargetConfigProto of a card, as text."""
    card = CARDS[name]
    major, minor, lanes, l2, ghz, memory, shared = _MORE[name]
    feature = "ACCELERATED_FEATURES" if card.architecture.endswith("a") else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {card.shared_bytes}
  core_count: {card.cores}  fpus_per_core: {lanes}  clock_rate_ghz: {ghz}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {int(card.bytes_per_s)}  l2_cache_size: {l2}  device_memory_size: {memory}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major}  minor: {minor}  feature_extension: {feature} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9  minor: 10  patch: 0 }}
device_description_str: "NVIDIA {name.upper()}"
"""


def mesh(name: str, cards: int = 1, axis: str = "device") -> Mesh:
    """A mesh of `cards` described cards in one machine."""
    topology = topologies.get_topology_desc("", "cuda", target_config=describe(name), topology=f"1x1x{cards}")
    return Mesh(np.array(topology.devices), (axis,), axis_types=(AxisType.Auto,))


def compile_for(mesh: Mesh, function, *args, shardings: Any = None, **jit_options):
    """`function` compiled for `mesh`; `args` are pytrees of `ShapeDtypeStruct`s, `shardings` a tree like theirs; None:
    everything everywhere."""
    if shardings is None:
        shardings = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), args)
    shaped = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), args, shardings)
    # The abstract mesh tells lowering rules which card is meant; Mosaic asks the default device for its architecture.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), jax.default_device(mesh.devices.flat[0]):
        return jax.jit(function, **jit_options).lower(*shaped).compile()
