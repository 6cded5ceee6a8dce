"""The tiny model over two devices, and a state that is saved in the middle and goes on: here and over two devices."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from support.drive import Ask, Driver
from support.tiny import TINY, tiny_decoder

from jpaged.config import EngineConfig
from jpaged.record.snapshot import pack_state, unpack_state
from jpaged.step import make_state, violations

CONFIG = EngineConfig(
    max_queue=64, page_size=4, num_pages=20, max_num_seqs=4, max_num_batched_tokens=24, max_model_len=40
)
MORE_PAGES = replace(CONFIG, num_pages=40)
SHAPE = {"layers": TINY.num_layers, "kv_heads": TINY.num_kv_heads, "head_dim": TINY.head_dim}
BUDGET, STEPS = 24, 60


ALIKE = list(range(3, 12))
ASKS = [
    Ask(i + 1, [*ALIKE, *(np.random.default_rng(i).integers(0, 256, 1 + 3 * i).tolist())], 30 + i, temperature=i % 2,
        seed=i)
    for i in range(4)
]  # fmt: skip


def test_the_tiny_model_goes_on_with_its_tokens_here_and_over_two_devices(tmp_path):
    """Greedy and sampled, beginning alike, in a pool that is too small for all. Catches: keys or values in another
    page, layer or head than they were; a pool that is whole on each device; a state that is laid out otherwise than it
    was asked for. And of the same requests from their beginning, over two devices with one of two KV heads each: a head
    that meets another device's keys, a sum over the devices left out or done twice."""
    decoder, params = tiny_decoder(TINY)
    driver = Driver(CONFIG, decoder, params, **SHAPE)
    driver.submit(*ASKS)
    for _ in range(9):
        driver.step()
    packed = pack_state(driver.state)
    driver.until_done()
    expected = np.asarray(driver.state.requests.tokens).tolist()
    expected_logprobs = {uid: [*got.logprobs] for uid, got in driver.got.items()}

    here = Driver(CONFIG, decoder, params, **SHAPE)
    here.state, here.got = unpack_state(packed, make_state(CONFIG, **SHAPE)), driver.got
    assert violations(here.state) == []
    here.until_done()
    assert np.asarray(here.state.requests.tokens).tolist() == expected
    assert int(here.state.counters.steps) == int(driver.state.counters.steps)

    file, script = tmp_path / "packed.npz", Path(__file__).with_name("two_devices.py")
    np.savez(file, **packed)
    result = subprocess.run([sys.executable, str(script), str(file)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    found = json.loads(result.stdout.splitlines()[-1])
    logprobs = found.pop("logprobs")
    assert found == {
        "tokens": expected,
        "from_the_start": expected,
        "heads_on_a_device": 1,
        "violations": [],
        "differ": [],
    }
    for uid, numbers in expected_logprobs.items():
        np.testing.assert_allclose(logprobs[str(uid)], numbers, atol=1e-4)
