"""Directories that hold a running engine, by Orbax:

    DIR/checkpoint.json      format and version of this, JAX's version; shape and dtype of every array
    DIR/arrays/              the state, as `snapshot.pack_state` names it
    DIR/files/engine.json    sizes, a fingerprint of the model, and what the engine holds on the host
    DIR/files/...            what the caller adds, for example llm.json

Nothing of the model is kept but the fingerprint, which says whether the one at hand is the same.
"""

from __future__ import annotations

import json
import types
import typing
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.config import EngineConfig
from jpaged.models.spec import ModelConfig
from jpaged.policy import Policy, named
from jpaged.record.stats import TokenEvent
from jpaged.request import Request
from jpaged.step.sharing.index import token_hash

FORMAT = "jpaged-engine"
VERSION = 3
ENGINE_FILE = "engine.json"
#: Fields of the configuration that may be others when the engine goes on. They change no token.
FREE_FIELDS = frozenset(
    {
        "num_pages", "pool_bytes", "gpu_memory_utilization", "max_num_batched_tokens", "token_budgets",
        "steps_per_burst", "admission", "victim", "preemption", "swap_space_bytes", "swap_page_cost",
        "compilation_cache", "async_scheduling",
    }
)  # fmt: skip
_POLICIES = ("admission", "victim")

T = TypeVar("T")


@dataclass(frozen=True)
class HeldRequest:
    """A request that has not ended, and what came out of it."""

    request: Request
    uids: tuple[int, ...]  # of its continuations that have not ended
    indices: tuple[int, ...]  # of the same
    pending: tuple[int, ...]  # uids that are on the host's queue, not in the state
    before: tuple[tuple[int, ...], ...]  # of the same as `uids`: what the parent of a branch had generated
    events: tuple[TokenEvent, ...]


@dataclass(frozen=True)
class HostState:
    """What an engine holds on the host."""

    requests: tuple[HeldRequest, ...]  # in the order of submission
    next_uid: int
    seeds: dict[str, Any]  # of the generator from which requests draw one
    namespaces: dict[str, Any]  # see `Namespaces.to_json`
    weight_version: int
    totals: dict[str, int]


@dataclass(frozen=True)
class _EngineFile:
    """engine.json"""

    config: dict[str, Any]  # as `EngineConfig.to_json`
    model: dict[str, Any]  # a ModelConfig
    weights: dict[str, str]  # see `fingerprints`
    host: HostState


def save(
    directory: str | Path,
    arrays: Mapping[str, np.ndarray],
    host: HostState,
    *,
    config: EngineConfig,
    model: ModelConfig,
    params: Any,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Writes a new directory, which appears complete or not at all.

    Args:
        arrays: of `pack_state`.
        params: the weights; only their fingerprints are kept.
        files: more texts by plain file name.

    Returns:
        The directory, absolute.

    Raises:
        ValueError: something is already there.
    """
    from checkpoints import orbax  # takes a second to import

    engine = _EngineFile(config.to_json(), asdict(model), fingerprints(params), host)
    metadata = {"format": FORMAT, "version": VERSION, "jax": jax.__version__}
    return orbax.save(directory, arrays, metadata, {ENGINE_FILE: to_json(engine), **(files or {})})


class Saved:
    """A directory that `save` wrote.

    Raises:
        ValueError: it is not whole, or of a version that is not known here.
    """

    def __init__(self, directory: str | Path):
        from checkpoints import orbax

        self._source = orbax.OrbaxSource(directory)
        self.path, metadata = self._source.path, self._source.metadata
        found = metadata.get("format"), metadata.get("version")
        if found != (FORMAT, VERSION):
            raise ValueError(
                f"{self.path} holds format and version {found}, and this jpaged reads {(FORMAT, VERSION)}: it is no "
                "running engine, or another jpaged saved it"
            )
        if metadata["jax"] != jax.__version__:
            warnings.warn(
                f"{self.path} was saved with JAX {metadata['jax']} and goes on with {jax.__version__}: where they "
                "round differently, tokens may differ from those of an engine that was not interrupted",
                stacklevel=3,
            )
        self._engine = self.read(ENGINE_FILE, _EngineFile)

    @property
    def host(self) -> HostState:
        return self._engine.host

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """For `unpack_state`."""
        return dict(self._source.restore())

    def read(self, name: str, kind: type[T]) -> T:
        """The dataclass `kind` that `to_json` wrote into one of the files.

        Raises:
            ValueError: it is not there, or has other fields.
        """
        from checkpoints.huggingface import read_json  # with what reads weights, which an engine alone does not need

        file = self._source.files / name
        return from_json(kind, read_json(file), str(file))

    def config(self, **changes: Any) -> EngineConfig:
        """The configuration to go on with: as it was, but for `changes`.

        Raises:
            ValueError: for a change of a field that is not of FREE_FIELDS, or a policy that must be given.
        """
        stored = dict(self._engine.config)
        names = {f.name for f in fields(EngineConfig)}
        if odd := sorted(stored.keys() ^ names):
            raise ValueError(f"{self.path} and this jpaged have not the same fields of EngineConfig: {odd}")
        for name in _POLICIES:
            stored[name] = changes[name] if name in changes else self._policy(name, stored[name])
        if changes.get("pool_bytes") is not None:
            stored["num_pages"] = None
        if "preemption" in changes:
            stored["swap_space_bytes"] = stored["swap_page_cost"] = None
        config = replace(EngineConfig(**stored), **changes)
        self._check_sizes(config)
        return config

    def check(self, config: EngineConfig, model: ModelConfig, params: Any) -> None:
        """Raises ValueError, in words, if an engine with these can not go on with what was saved."""
        self._check_sizes(config)
        now, was = json.loads(to_json(asdict(model))), self._engine.model
        if other := sorted(name for name in now.keys() | was.keys() if now.get(name) != was.get(name)):
            shown = ", ".join(f"{name} {was.get(name)!r} (here {now.get(name)!r})" for name in other)
            raise ValueError(f"{self.path} was saved with another model, of {shown}")
        weights, saved = fingerprints(params), self._engine.weights
        if other := sorted(name for name in weights.keys() | saved.keys() if weights.get(name) != saved.get(name)):
            raise ValueError(
                f"{self.path} was saved with other weights: {len(other)} differ, the first is {other[0]}. What it has "
                "computed means nothing to these; give the model that it was saved with"
            )

    def _check_sizes(self, config: EngineConfig) -> None:
        for name in sorted({f.name for f in fields(config)} - FREE_FIELDS):
            if (now := getattr(config, name)) != (was := self._engine.config.get(name)):
                raise ValueError(
                    f"{self.path} was saved with {name} {was!r} and cannot go on with {now!r}; what may change is "
                    f"{', '.join(sorted(FREE_FIELDS))}"
                )

    def _policy(self, field: str, name: str) -> Policy:
        try:
            return named(name)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}; give it, or another, as {field}=") from error


# Weights


def fingerprints(params: Any) -> dict[str, str]:
    """For each weight its dtype, shape, and a checksum of its bits, which does not depend on how it lies on devices. By
    its path in `params`."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sums = jax.device_get([_checksum(leaf) for _, leaf in leaves])
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)} {int(total):08x}"
        for (path, leaf), total in zip(leaves, sums, strict=True)
    }


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}")).astype(jnp.uint32)
    place = jnp.zeros(array.shape, jnp.uint32)
    for axis in range(array.ndim):
        place = place * jnp.uint32(array.shape[axis]) + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
    # One of the two words: a slice of what was never put together.
    return jnp.sum(token_hash(bits, place)[..., 0], dtype=jnp.uint32)


# Dataclasses as JSON


def to_json(value: Any) -> str:
    """Dataclasses, tuples, enumerations and numpy's numbers, for `from_json`."""

    def plain(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            return {f.name: getattr(value, f.name) for f in fields(value)}
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{value!r:.80} cannot be saved as JSON")

    return json.dumps(value, default=plain)


def from_json(kind: Any, value: Any, where: str) -> Any:
    """A value of the type `kind` from what JSON makes of it.

    Raises:
        ValueError: a dataclass has other fields, or refuses their values; `where` says in which file.
    """
    arguments = typing.get_args(kind)
    match typing.get_origin(kind):
        case typing.Union | types.UnionType:
            kinds = [one for one in arguments if one is not types.NoneType]
            return value if value is None or len(kinds) > 1 else from_json(kinds[0], value, where)
        case origin if origin is tuple:
            each = [arguments[0]] * len(value) if arguments[1:] == (...,) else arguments
            return tuple(from_json(one, item, where) for one, item in zip(each, value, strict=True))
    if not isinstance(kind, type):
        return value
    if issubclass(kind, Enum):
        return kind(value)
    if not is_dataclass(kind):
        return value
    names = {f.name for f in fields(kind)}
    if not isinstance(value, Mapping) or value.keys() != names:
        odd = sorted(names ^ value.keys()) if isinstance(value, Mapping) else value
        raise ValueError(f"{where}: {kind.__name__} has not the same fields here: {odd!r:.200}")
    hints = typing.get_type_hints(kind)
    return kind(**{name: from_json(hints[name], value[name], where) for name in sorted(names)})
