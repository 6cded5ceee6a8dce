"""No test: run by `test_restored.py` in a process with two CPU devices. Goes on with a state of the tiny model that
was packed in a process with one, in a pool that is split by KV heads and has more pages, and runs the same requests
from their beginning; prints the tokens of both, log-probabilities of the second, and what differs in a state that is
packed again there. One program does all.

    python two_devices.py FILE      an .npz of `pack_state`
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
sys.path.insert(0, str(Path(__file__).parents[1]))  # support
sys.path.insert(0, str(Path(__file__).parents[2]))  # the project

import jax
import numpy as np
from parity.test_restored import ASKS, BUDGET, MORE_PAGES, SHAPE, STEPS
from support.drive import submission
from support.tiny import TINY, tiny_decoder

from jpaged.parallel.rules import TENSOR, parameter_shardings, state_shardings
from jpaged.record.snapshot import pack_state, unpack_state
from jpaged.step import make_state, run, submit, violations


def main() -> None:
    with np.load(sys.argv[1]) as file:
        packed = dict(file)
    decoder, params = tiny_decoder(TINY)
    mesh = jax.make_mesh((2,), (TENSOR,), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        params = jax.device_put(params, parameter_shardings(mesh, params))
        empty = make_state(MORE_PAGES, **SHAPE)
        shardings = state_shardings(mesh, empty)
        fresh = jax.device_put(submit(empty, submission(MORE_PAGES, ASKS)), shardings)
        state = unpack_state(packed, jax.device_put(make_state(MORE_PAGES, **SHAPE), shardings))
        heads, wrong = state.pool.k.addressable_shards[0].data.shape[2], violations(state)
        again = pack_state(state)
        differ = [name for name, array in packed.items() if not np.array_equal(array, again[name])]
        burst = jax.jit(
            partial(run, decoder, budget=BUDGET, steps=STEPS), donate_argnums=1,
            compiler_options={"xla_backend_optimization_level": 0},
        )  # fmt: skip
        state = burst(params, state)[0]
        fresh, records = burst(params, fresh)[:2]
    records = jax.device_get(records)
    logprobs = {
        ask.uid: records.logprob[records.sampled & (records.uid == ask.uid)].tolist() for ask in ASKS
    }  # fmt: skip
    print(
        json.dumps(
            {
                "tokens": np.asarray(state.requests.tokens).tolist(), "heads_on_a_device": heads, "violations": wrong,
                "differ": differ, "from_the_start": np.asarray(fresh.requests.tokens).tolist(), "logprobs": logprobs,
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
