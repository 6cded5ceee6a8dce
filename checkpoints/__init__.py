"""Checkpoint files: named tensors in and out. What the tensors mean is not decided here."""

from __future__ import annotations

from pathlib import Path

from checkpoints.gguf import GGUFSource
from checkpoints.huggingface import HuggingFaceSource
from checkpoints.source import TensorInfo, TensorSource

__all__ = ["GGUFSource", "HuggingFaceSource", "TensorInfo", "TensorSource", "open_source"]


def open_source(path: str | Path) -> TensorSource:
    """Opens a `.gguf` file, a Hugging Face directory or an Orbax directory.

    Raises:
        ValueError: `path` is none of these, or is damaged; the message names the file.
    """
    path = Path(path).expanduser()
    if path.is_file():
        return GGUFSource(path)
    if not path.is_dir():
        raise ValueError(f"{path} does not exist")
    from checkpoints.orbax import OrbaxSource, is_orbax  # imports jax, which reading the others does not need

    if is_orbax(path):
        return OrbaxSource(path)
    return HuggingFaceSource(path)
