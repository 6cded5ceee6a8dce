"""No test: run by `test_mosaic_gpu.py` in a process with two CPU devices. The kernel for NVIDIA GPUs in the interpreter
under `shard_map`, each device with half of the KV heads; prints the largest difference from what numpy makes of it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "NPROC": "16"}
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from support.attention import in_numpy

from pallas_kernels.cards import CARDS
from pallas_kernels.paged_attention.cases import Case, operands
from pallas_kernels.paged_attention.mosaic_gpu import paged_attention_mosaic_gpu


def main() -> None:
    case = Case("split", ((1, 70), (9, 20), (0, 0)))
    queries, *pools, layer, table, start, lengths = operands(case)
    card = replace(CARDS["h100"], cores=3)
    attend = partial(paged_attention_mosaic_gpu, card=card, interpret=plgpu.InterpretGPUParams(), **case.options)
    mesh = Mesh(np.array(jax.devices()), ("tensor",))
    heads, pages, whole = PartitionSpec(None, "tensor"), PartitionSpec(None, None, "tensor"), PartitionSpec()

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(heads, pages, pages, whole, whole, whole), out_specs=heads, check_vma=False
    )
    def split(queries, k, v, table, start, lengths):
        return attend(queries, k, v, layer, table, start, lengths)

    out = split(queries, *pools, table, start, lengths)
    assert len(out.sharding.device_set) == 2
    print(np.abs(np.asarray(out) - in_numpy(case, queries, *pools, layer, table, start, lengths)).max())


if __name__ == "__main__":
    main()
