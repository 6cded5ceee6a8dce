"""A checkpoint of any kind as an Orbax directory of ours."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints.huggingface import TOKENIZER_FILES
from jpaged.models.load import GGUF_TOKENIZER_FILE, Checkpoint, load_checkpoint, resolve


def save_orbax(dst: str | Path, checkpoint: Checkpoint, dtype: Any = None) -> Path:
    """Saves parameters, configuration and tokenizer as an Orbax directory that `load_checkpoint` opens.

    All parameters are in host memory at once, because Orbax writes a tree as a whole.

    Args:
        dst: a new directory; it appears complete or not at all.
        dtype: as for `Checkpoint.parameters`.

    Raises:
        ValueError: `dst` exists, or a parameter cannot be read.
    """
    from checkpoints import orbax  # imports jax, which reading files does not need

    files: dict[str, str] = {}
    if isinstance(checkpoint.tokenizer_source, Mapping):
        files[GGUF_TOKENIZER_FILE] = json.dumps(dict(checkpoint.tokenizer_source))
    else:
        for name in TOKENIZER_FILES:
            if (checkpoint.tokenizer_source / name).is_file():
                files[name] = (checkpoint.tokenizer_source / name).read_text(encoding="utf-8")
    metadata = {"config": dataclasses.asdict(checkpoint.config), "converted_from": checkpoint.path.name}
    return orbax.save(dst, dict(checkpoint.parameters(dtype)), metadata, files)


def convert(src: str | Path, dst: str | Path, dtype: Any = None) -> Path:
    """`save_orbax` of any model that `resolve` finds; raises what these two raise."""
    if Path(dst).exists():  # before a download or a long read
        raise ValueError(f"{dst} already exists: give a new directory")
    return save_orbax(dst, load_checkpoint(resolve(src)), dtype)
