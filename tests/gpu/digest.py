"""Whether the GPU kernels, and what they are tested by, are those of the last whole run of `check.sh`.

    python3 tests/gpu/digest.py            ends with an error, and says what to do, where they are not
    python3 tests/gpu/digest.py --write    records them in tests/gpu/whole_run.json, after a whole run

The digest is a SHA-256 over the names and contents of files, sorted by name. It needs nothing but Python.
"""

from __future__ import annotations

import hashlib
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("whole_run.json")
PATTERNS = (
    "pallas_kernels/**/*.py", "pallas_kernels/**/*.json", "tests/kernels/test_mosaic_gpu*.py",
    "tests/kernels/test_ampere.py", "tests/gpu/aot_kernels.py", "tests/gpu/emulate_ampere.py",
    "tests/support/attention.py", "tests/support/gpu_aot.py", "tests/support/ptx.py",
)  # fmt: skip


def digest(root: Path = ROOT) -> str:
    """Of the files that `PATTERNS` name below `root`."""
    files = sorted({path.relative_to(root).as_posix() for pattern in PATTERNS for path in root.glob(pattern)})
    found = hashlib.sha256()
    for name in files:
        content = (root / name).read_bytes()
        found.update(f"{name} {len(content)}\n".encode() + content)
    return found.hexdigest()


def main() -> None:
    now = digest()
    if "--write" in sys.argv:
        RECORD.write_text(json.dumps({"digest": now, "date": datetime.now(UTC).date().isoformat()}) + "\n")
        return
    if not RECORD.exists() or json.loads(RECORD.read_text())["digest"] != now:
        sys.exit(
            "The GPU kernels, or what they are tested by, have changed since the last whole run. Run\n"
            "    tests/gpu/check.sh record\n"
            "and commit the tables and the digest that it writes into tests/gpu/ together with the change."
        )


if __name__ == "__main__":
    main()
