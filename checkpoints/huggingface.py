"""Hugging Face directories: config.json and safetensors files, in one piece or in shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints.source import TensorInfo, unknown_tensor

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
#: what describes a tokenizer
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip

#: element types that are read; any other one (8-bit floats, integers) needs a scheme that is not known here
CLAIMED_KINDS = ("F64", "F32", "F16", "BF16")


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`.

    Raises:
        ValueError: naming the file, when it cannot be read or holds anything but an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value


def shards(index: Path) -> dict[str, set[str]]:
    """The files that the index of a sharded checkpoint names, and the tensors that each of them holds.

    Raises:
        ValueError: naming the index, when it says no such thing.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no 'weight_map' that says which file holds which tensor")
    files: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        # a shard is a file beside its index; anything else would read outside the model's directory
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index} places tensor {name!r} in {file!r}, which is not a plain file name")
        files.setdefault(file, set()).add(name)
    return files


class HuggingFaceSource:
    """A directory as `save_pretrained` writes it.

    `metadata` is `{"config": ..., "generation_config": ...}`, the second `{}` where there is no such file.
    The index of a sharded checkpoint is obeyed to the letter: a shard it names must exist and hold exactly
    the tensors that the index says it holds.

    Raises:
        ValueError: naming the file, and the tensor where there is one, for anything missing, left over,
            truncated or of an element type outside `CLAIMED_KINDS`.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        config = self.path / CONFIG_FILE
        if not config.is_file():
            raise ValueError(f"{self.path} has no {CONFIG_FILE}: it is not a Hugging Face model directory")
        generation = self.path / GENERATION_CONFIG_FILE
        self.metadata: Mapping[str, Any] = {
            "config": read_json(config),
            "generation_config": read_json(generation) if generation.is_file() else {},
        }
        self._shards: dict[Path, tuple[Any, int]] = {}  # and how many bytes each file has
        self._infos: dict[str, TensorInfo] = {}
        index = self.path / INDEX_FILE
        if index.is_file():
            self._open_sharded(index)
        elif (self.path / SINGLE_FILE).is_file():
            self._open_shard(self.path / SINGLE_FILE)
        else:
            found = sorted(p.name for p in self.path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".safetensors"))
            raise ValueError(
                f"{self.path} has neither {SINGLE_FILE} nor {INDEX_FILE}"
                + (f"; it has {', '.join(found)}: save the model again as safetensors" if found else "")
            )

    def names(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def pieces(self, name: str) -> list[slice]:
        return self._info(name).pieces()

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        info = self._info(name)
        shard, size = self._shards[info.file]
        try:
            # The file is mapped, and a page that is gone would end the process.
            if (now := info.file.stat().st_size) != size:
                raise ValueError(f"{info.file} had {size:,} bytes when it was opened and has {now:,} now")
            if rows is None or rows == slice(0, info.shape[0]):
                return shard.get_tensor(name)
            return shard.get_slice(name)[rows]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"tensor {name!r} of {info.file} cannot be read: {error}") from error

    def _info(self, name: str) -> TensorInfo:
        if name not in self._infos:
            raise unknown_tensor(name, self)
        return self._infos[name]

    def _open_sharded(self, index: Path) -> None:
        expected = shards(index)
        if SINGLE_FILE not in expected and (self.path / SINGLE_FILE).exists():
            raise ValueError(
                f"{self.path} has both {SINGLE_FILE} and an index ({INDEX_FILE}) that does not name it: remove one"
            )
        missing = [file for file in sorted(expected) if not (self.path / file).is_file()]
        if missing:
            raise ValueError(
                f"{self.path} lacks {', '.join(missing)}, which {INDEX_FILE} names: download the model again"
            )
        for file, names in sorted(expected.items()):
            held = self._open_shard(self.path / file)
            for name in sorted(names - held):
                raise ValueError(f"{self.path / file} lacks tensor {name!r}, which {INDEX_FILE} says it holds")
            for name in sorted(held - names):
                raise ValueError(f"{self.path / file} holds tensor {name!r}, which {INDEX_FILE} does not place there")

    def _open_shard(self, file: Path) -> set[str]:
        try:
            shard, size = safe_open(file, framework="numpy"), file.stat().st_size
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is not a whole safetensors file: {error}") from error
        self._shards[file] = shard, size
        names = set(shard.keys())
        for name in shard.offset_keys():  # in the order in which the file holds them
            view = shard.get_slice(name)
            if view.get_dtype() not in CLAIMED_KINDS:
                raise ValueError(
                    f"tensor {name!r} of {file} is stored as {view.get_dtype()}; supported: {', '.join(CLAIMED_KINDS)}"
                )
            self._infos[name] = TensorInfo(tuple(view.get_shape()), view.get_dtype(), file)
        return names
