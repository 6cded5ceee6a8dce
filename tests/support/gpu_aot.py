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

from pallas_kernels.cards import CAPABILITIES, Card, card_of

#: Cards that are described, as JAX would tell of them: device kind, compute capability, cores; and what
#: `pallas_kernels.cards` does not need, from OpenXLA's card specifications and data sheets: lanes a core, bytes of L2,
#: GHz, bytes of memory, bytes of memory a second.
_DESCRIBED = {
    "t4": ("NVIDIA T4", (7, 5), 40, 64, 4_194_304, 1.59, 15_843_721_216, 320_000_000_000),
    "a100": ("NVIDIA A100", (8, 0), 108, 64, 41_943_040, 1.41, 85_100_068_864, 2_039_000_000_000),
    "a10": ("NVIDIA A10", (8, 6), 72, 128, 6_291_456, 1.695, 23_609_475_072, 600_000_000_000),
    "l4": ("NVIDIA L4", (8, 9), 58, 128, 50_331_648, 2.04, 23_609_475_072, 300_000_000_000),
    "h100": ("NVIDIA H100", (9, 0), 132, 128, 52_428_800, 1.98, 84_978_434_048, 3_352_000_000_000),
    "h200": ("NVIDIA H200", (9, 0), 132, 128, 52_428_800, 1.98, 151_397_597_184, 4_800_000_000_000),
    "b200": ("NVIDIA B200", (10, 0), 148, 128, 132_644_864, 1.965, 191_514_411_008, 7_672_000_000_000),
    "b300": ("NVIDIA B300", (10, 3), 148, 128, 132_644_864, 1.92, 287_762_808_832, 7_672_000_000_000),
    "rtx5090": ("NVIDIA GeForce RTX 5090", (12, 0), 170, 128, 100_663_296, 2.407, 33_669_316_608, 1_792_000_000_000),
}


def card(name: str) -> Card:
    """The card that JAX tells of where `name` is described."""
    kind, capability, cores, *_ = _DESCRIBED[name]
    found = card_of(kind, capability, cores)
    assert found is not None
    return found


def describe(name: str) -> str:
    """GpuTargetConfigProto of a card, as text."""
    kind, (major, minor), cores, lanes, l2, ghz, memory, bandwidth = _DESCRIBED[name]
    known = CAPABILITIES[major, minor]
    feature = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: {known.shared_core_bytes}
  shared_memory_per_block_optin: {known.shared_bytes}
  core_count: {cores}  fpus_per_core: {lanes}  clock_rate_ghz: {ghz}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}  l2_cache_size: {l2}  device_memory_size: {memory}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major}  minor: {minor}  feature_extension: {feature} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9  minor: 10  patch: 0 }}
device_description_str: "{kind}"
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
