"""No test: run by `test_memory.py` in a process of its own. Makes an engine with a small pool, so that all that is
loaded once is there, and then one with a large pool; prints what the memory of the process has been at most, in bytes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import psutil

from jpaged.config import EngineConfig
from jpaged.runtime.engine import Engine
from support.shapes import STUB_MODEL
from support.stubs import HistoryDecoder


def peak() -> int:
    """Bytes of main memory that this process has had at the same time."""
    # Not `ru_maxrss`, which counts the test's process, from which this one was forked.
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))


def main() -> None:
    def engine(pages: int) -> Engine:
        config = EngineConfig(
            page_size=16, num_pages=pages, max_num_seqs=4, max_queue=4, max_num_batched_tokens=8, max_model_len=64
        )
        return Engine(HistoryDecoder(), (), replace(STUB_MODEL, num_heads=4, num_kv_heads=4, head_dim=64), config)

    first = engine(8)
    first.close()
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # what compiling took before is not counted
    made = engine(int(sys.argv[1]))
    jax.block_until_ready(made.state)
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(made.state))
    when_made = peak()
    next(iter(jax.tree.leaves(made.state))).delete()  # as when a burst failed: some buffers are gone, others are not
    made.abort_all()
    jax.block_until_ready(made.state)
    print(json.dumps({"before": before, "state": state, "made": when_made, "made_again": peak()}))


if __name__ == "__main__":
    main()
