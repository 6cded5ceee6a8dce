"""No test: run by `test_tiny_models.py` in a process with several CPU devices. The tiny model, whole and split by KV
heads, through the engine's own burst; prints what differs, and how many arrays each device holds a part of."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
from support.drive import Ask, submission
from support.tiny import TINY, tiny_decoder

from jpaged.config import EngineConfig
from jpaged.parallel.rules import TENSOR, parameter_shardings, state_shardings
from jpaged.step import make_state, run, submit


def main() -> None:
    config = EngineConfig(page_size=4, num_pages=40, max_num_seqs=4, max_num_batched_tokens=24, max_model_len=40)
    asks = [Ask(i + 1, list(range(3, 3 + 5 * i + 1)), 30) for i in range(3)]
    shape = {"layers": TINY.num_layers, "kv_heads": TINY.num_kv_heads, "head_dim": TINY.head_dim}

    def generate(mesh):
        decoder, params = tiny_decoder(TINY)
        state = submit(make_state(config, **shape, dtype=np.dtype("float32")), submission(config, asks))
        if mesh is not None:
            params = jax.device_put(params, parameter_shardings(mesh, params))
            state = jax.device_put(state, state_shardings(mesh, state))
        burst = jax.jit(partial(run, decoder, budget=24, steps=24), donate_argnums=1)
        return burst(params, state)[0]

    whole = generate(None)
    mesh = jax.make_mesh((2,), (TENSOR,), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        split = generate(mesh)
    pool = split.pool.k
    print(
        json.dumps(
            {
                "tokens": np.asarray(whole.requests.tokens).tolist(),
                "split_tokens": np.asarray(split.requests.tokens).tolist(),
                "heads_on_a_device": pool.addressable_shards[0].data.shape[2],
                "pool_error": float(np.abs(np.asarray(pool) - np.asarray(whole.pool.k)).max()),
            }
        )
    )


if __name__ == "__main__":
    main()
