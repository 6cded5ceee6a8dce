"""Compiles a JAX program for a described NVIDIA GPU on a machine that has none.

XLA's CUDA plugin compiles ahead of time for a card it is told about. The result cannot run here, but it shows what
the compiler made of the program: memory, aliased arguments, copies, loops, conditionals. Used in a process of its
own (`tests/gpu/aot_step.py`), where the plugin is installed.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

#: GpuTargetConfigProto of an H200, from OpenXLA's card specifications
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800  device_memory_size: 151397597184
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9  minor: 0  feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
dnn_version_info { major: 9  minor: 10  patch: 0 }
device_description_str: "NVIDIA H200"
"""


def h200() -> Mesh:
    """A mesh of one described H200."""
    topology = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1")
    return Mesh(np.array(topology.devices), ("device",))


def compile_for(mesh: Mesh, function, *args, **jit_options):
    """`function` compiled for `mesh`; `args` are pytrees of `ShapeDtypeStruct`s."""
    sharding = NamedSharding(mesh, PartitionSpec())
    shaped = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
    # The abstract mesh tells lowering rules which card is meant.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function, **jit_options).lower(*shaped).compile()
