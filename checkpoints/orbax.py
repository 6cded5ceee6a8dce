"""Orbax directories: a flat set of named arrays, a JSON description, and small text files beside them.

    DIR/checkpoint.json     format, metadata, shape and dtype of every array
    DIR/arrays/             what Orbax writes
    DIR/files/              text files, for example a tokenizer

Arrays come back on whatever devices the caller has; the devices they were saved from are never asked for.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from checkpoints.huggingface import read_json
from checkpoints.source import TensorInfo, unknown_tensor

DESCRIPTION_FILE = "checkpoint.json"
ARRAYS = "arrays"
FILES = "files"
FORMAT = "orbax-flat"
VERSION = 1


def save(
    path: str | Path,
    arrays: Mapping[str, np.ndarray | jax.Array],
    metadata: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Writes a new directory `path`; it appears complete or not at all.

    Args:
        path: must not exist yet, or be an empty directory. May be relative.
        arrays: by name; NumPy or JAX arrays of any dtype Orbax stores, bfloat16 included.
        metadata: anything JSON can hold.
        files: text by plain file name.

    Returns:
        The directory, absolute.

    Raises:
        ValueError: something is already there, or a file name is not plain.
    """
    target = Path(path).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} already exists: give a new directory, or remove it first")
    for name in files or {}:
        if Path(name).name != name:
            raise ValueError(f"files are stored under plain names, got {name!r}")
    described = {n: {"shape": list(a.shape), "dtype": np.dtype(a.dtype).name} for n, a in arrays.items()}
    description = {
        "format": FORMAT,
        "version": VERSION,
        "metadata": dict(metadata or {}),
        "arrays": described,
    }
    text = json.dumps(description, indent=1)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        # Orbax stores no array without elements, and nothing where there are no others: their description is enough.
        if stored := {name: array for name, array in arrays.items() if array.size}:
            with ocp.PyTreeCheckpointer() as checkpointer:
                checkpointer.save(partial / ARRAYS, stored)
        else:
            (partial / ARRAYS).mkdir()
        (partial / FILES).mkdir()
        for name, content in (files or {}).items():
            (partial / FILES / name).write_text(content, encoding="utf-8")
        (partial / DESCRIPTION_FILE).write_text(text, encoding="utf-8")
        partial.chmod(0o755)  # mkdtemp makes it private
        os.replace(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def is_orbax(path: str | Path) -> bool:
    """Whether `path` is a directory that `save` wrote."""
    return (Path(path) / DESCRIPTION_FILE).is_file()


def restore(
    path: str | Path, sharding: jax.sharding.Sharding | Mapping[str, jax.sharding.Sharding] | None = None
) -> dict[str, np.ndarray] | dict[str, jax.Array]:
    """All arrays of a directory that `save` wrote.

    Args:
        path: the directory; may be relative.
        sharding: where to put the arrays: one for all, or one by name for every array. None: NumPy arrays.

    Raises:
        ValueError: not such a directory, an array is damaged, or a sharding is missing or left over.
    """
    return OrbaxSource(path).restore(sharding)


class OrbaxSource:
    """A directory that `save` wrote, as a `TensorSource`. `read` brings one array to the host.

    `metadata` is what was saved as such; `files` the directory of the text files.

    Raises:
        ValueError: not such a directory, one of another version, or one whose description is damaged. From `read`
            also where it describes another array than is stored.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._root = self.path.expanduser().absolute()
        if not is_orbax(self._root):
            raise ValueError(f"{self.path} has no {DESCRIPTION_FILE}: it was not saved by checkpoints.orbax")
        description = read_json(self._root / DESCRIPTION_FILE)
        found = (description.get("format"), description.get("version"))
        if found != (FORMAT, VERSION):
            raise ValueError(
                f"{self._root / DESCRIPTION_FILE}: format and version are {found}, not {(FORMAT, VERSION)}"
            )
        if not (self._root / ARRAYS).is_dir():
            raise ValueError(f"{self._root / ARRAYS} is missing: copy the whole directory")
        self.metadata: Mapping[str, Any] = self._object(description, "metadata")
        self._infos = {
            name: self._described(name, array) for name, array in self._object(description, "arrays").items()
        }

    def _object(self, description: Mapping[str, Any], key: str) -> dict[str, Any]:
        if not isinstance(value := description.get(key), dict):
            raise ValueError(
                f"{self._root / DESCRIPTION_FILE} is damaged: {key!r} must be an object, and is {value!r:.80}"
            )
        return value

    def _described(self, name: str, array: Any) -> TensorInfo:
        shape, dtype = (array.get("shape"), array.get("dtype")) if isinstance(array, dict) else (None, None)
        if isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape) and _is_dtype(dtype):
            return TensorInfo(tuple(shape), dtype, self._root / ARRAYS)
        raise ValueError(
            f"{self._root / DESCRIPTION_FILE} is damaged: it must give the shape and the dtype of array {name!r}, "
            f"and says {array!r:.80}"
        )

    @property
    def files(self) -> Path:
        return self._root / FILES

    def names(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def pieces(self, name: str) -> list[slice]:
        """One: Orbax reads arrays whole."""
        if name not in self._infos:
            raise unknown_tensor(name, self)
        return [slice(0, (self._infos[name].shape or (1,))[0])]

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        if name not in self._infos:
            raise unknown_tensor(name, self)
        return self._restore({name: ocp.RestoreArgs(restore_type=np.ndarray)})[name]

    def restore(
        self, sharding: jax.sharding.Sharding | Mapping[str, jax.sharding.Sharding] | None = None
    ) -> dict[str, Any]:
        """See the function of the same name."""
        if sharding is None:
            return self._restore({name: ocp.RestoreArgs(restore_type=np.ndarray) for name in self._infos})
        if isinstance(sharding, jax.sharding.Sharding):
            sharding = dict.fromkeys(self._infos, sharding)
        if sharding.keys() != self._infos.keys():
            odd = sorted(sharding.keys() ^ self._infos.keys())
            raise ValueError(f"shardings and arrays of {self.path} differ in {odd[:5]}")
        return self._restore({name: ocp.ArrayRestoreArgs(sharding=sharding[name]) for name in self._infos})

    def _restore(self, restore_args: dict[str, Any]) -> dict[str, Any]:
        stored = {name: args for name, args in restore_args.items() if 0 not in self._infos[name].shape}
        wanted = ocp.args.PyTreeRestore(item=dict.fromkeys(stored, 0), restore_args=stored, partial_restore=True)
        try:
            with ocp.PyTreeCheckpointer() as checkpointer:
                arrays = checkpointer.restore(self._root / ARRAYS, args=wanted) if stored else {}
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(f"{self._root / ARRAYS} cannot be restored: {error}") from error
        # Where there is no such array, Orbax gives back what it was asked with.
        if absent := sorted(name for name, array in arrays.items() if isinstance(array, int)):
            raise ValueError(f"{self._root / ARRAYS} has no array {absent[0]!r}, which {DESCRIPTION_FILE} describes")
        for name, array in arrays.items():
            info = self._infos[name]
            if tuple(array.shape) != info.shape or np.dtype(array.dtype).name != info.kind:
                raise ValueError(
                    f"array {name!r} of {self.path} is {array.dtype}{tuple(array.shape)}, and "
                    f"{DESCRIPTION_FILE} says {info.kind}{info.shape}"
                )
        empty_names = sorted(restore_args.keys() - stored.keys())
        if held := sorted(set(empty_names) & self._stored_names()) if empty_names else []:
            raise ValueError(
                f"{self._root / ARRAYS} has an array {held[0]!r} that is not empty, and {DESCRIPTION_FILE} says that "
                f"it has the shape {self._infos[held[0]].shape}"
            )
        for name in empty_names:
            empty = np.zeros(self._infos[name].shape, jnp.dtype(self._infos[name].kind))
            sharding = getattr(restore_args[name], "sharding", None)
            arrays[name] = empty if sharding is None else jax.device_put(empty, sharding)
        return arrays

    def _stored_names(self) -> set[str]:
        """The arrays that Orbax has stored, by its own metadata."""
        with ocp.PyTreeCheckpointer() as checkpointer:
            found = checkpointer.metadata(self._root / ARRAYS)
        return set(found.item_metadata.tree) if found is not None and found.item_metadata is not None else set()


def _is_dtype(name: Any) -> TypeGuard[str]:
    """Whether `name` is that of a dtype."""
    try:
        return isinstance(name, str) and jnp.dtype(name).name == name
    except TypeError:
        return False
