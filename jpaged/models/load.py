"""Checkpoints opened: which stored tensors make which weight.

Names and shapes of the whole checkpoint are checked before the first weight is read. Then weights come one at a time,
in the order of the file, each made piece by piece in its final dtype: the host holds one weight, beside what the caller
keeps and the piece that is being read.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints import GGUFSource, HuggingFaceSource, TensorSource, fetch, open_source
from jpaged.models.registry import FAMILIES, config_from_json, parse_gguf_config, parse_hf_config
from jpaged.models.spec import ModelConfig
from jpaged.models.weights import Part, Weight, declared

#: the tokenizer of a converted GGUF file
GGUF_TOKENIZER_FILE = "gguf_tokenizer.json"

_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_GGUF_HEAD, _GGUF_ROPE_FACTORS = "output.weight", "rope_freqs.weight"
# where the language model hides in a checkpoint whose configuration has a text_config
_NESTED_PREFIXES = ("", "language_model.")
# buffers that older versions saved; they follow from the configuration
_HARMLESS = re.compile(r"(?:.*\.)?rotary_emb\.inv_freq")
#: XLA on a CPU takes a numpy array as it is where it begins at a multiple of so many bytes
_ALIGNMENT = 64


@dataclass(frozen=True)
class _Plan:
    """How the weights of a checkpoint are made.

    Attributes:
        names: stored names by role; `{i}` is the number of the layer.
        interleaved: see `Weight.rows`.
        packed: weights are stored as they are declared, under their own paths.
    """

    weights: Mapping[str, Weight]
    names: Mapping[str, str]
    interleaved: bool = False
    packed: bool = False

    def parts(self, weight: Weight) -> list[tuple[str, Part]]:
        """The stored tensors of `weight`, by name."""
        if self.packed:
            return [(weight.path, Part(weight.name, weight.shape))]
        return [(self.names[part.role].format(i=weight.layer), part) for part in weight.parts]


class Checkpoint:
    """A checkpoint whose names and shapes are known to be right; its weights are still in the file.

    Attributes:
        path: the file or directory.
        config: what the model is.
        tokenizer_source: what `jpaged.text.tokenizer.Tokenizer.load` takes: a directory, or GGUF metadata.
    """

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        tokenizer_source: Path | Mapping[str, Any],
        plan: _Plan,
        spare_head: str | None = None,
    ):
        self.path = source.path
        self.config = config
        self.tokenizer_source = tokenizer_source
        self._source = source
        self._plan = plan
        self._spare_head = spare_head

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The weights that `parameters` yields, by path."""
        return {path: weight.shape for path, weight in self._plan.weights.items()}

    def parameters(self, dtype: Any = None) -> Iterator[tuple[str, np.ndarray]]:
        """Every weight once, by path, in the order of the file, and read when it is asked for. The array belongs to the
        caller.

        Args:
            dtype: "float32", "bfloat16" or "float16", or a NumPy dtype of these. None: as stored, quantised
                tensors as float32.

        Raises:
            ValueError: another dtype, a value that float16 cannot hold, or bytes that cannot be read.
        """
        wanted = None if dtype is None else _check_dtype(dtype)  # now, not at the first parameter
        return self._parameters(wanted)

    def _parameters(self, dtype: np.dtype | None) -> Iterator[tuple[str, np.ndarray]]:
        place = {name: number for number, name in enumerate(self._source.names())}
        first = {w.path: min(place[name] for name, _ in self._plan.parts(w)) for w in self._plan.weights.values()}
        for weight in sorted(self._plan.weights.values(), key=lambda weight: first[weight.path]):
            if weight.path == "embed" and self._spare_head is not None:
                self._compare_spare_head(self._plan.parts(weight)[0][0], self._spare_head)
            # No name for the array here: the caller's is the only one.
            yield weight.path, self._read(weight, dtype)

    def _read(self, weight: Weight, dtype: np.dtype | None) -> np.ndarray:
        source, parts = self._source, self._plan.parts(weight)
        if dtype is None:
            dtype = np.result_type(*(source.names()[name].dtype for name, _ in parts))
        array = _aligned(weight.shape, dtype)
        flat = array.reshape(-1, *weight.shape[-1:]) if len(weight.shape) > 1 else array
        for name, part in parts:
            rows = weight.rows(part, interleaved=self._plan.interleaved)
            each = len(rows) // source.names()[name].shape[0]  # rows of the weight in one of the stored tensor
            for piece in source.pieces(name):
                values = _cast(source.read(name, piece), dtype, name)
                place = rows[piece.start * each : piece.stop * each]
                together = bool((np.diff(place) == 1).all())  # a slice is copied faster
                flat[slice(place[0], place[-1] + 1) if together else place] = values.reshape(-1, *flat.shape[1:])
        return array

    def _compare_spare_head(self, embed: str, head: str) -> None:
        source = self._source
        for piece in source.pieces(embed):
            one, other = (source.read(name, piece).astype(np.float32) for name in (embed, head))
            if not np.array_equal(one, other):
                warnings.warn(
                    f"{self.path} says that its embeddings are tied, and stores a {head} that differs from "
                    "them; the embeddings are used, as in transformers. If the stored head is meant, set "
                    "tie_word_embeddings to false in config.json",
                    stacklevel=4,
                )
                return

    def __repr__(self) -> str:
        config = self.config
        return f"Checkpoint({str(self.path)!r}, family={config.family!r}, parameters={config.num_parameters:,})"


def load_checkpoint(source: str | Path | TensorSource) -> Checkpoint:
    """Opens a Hugging Face directory, a `.gguf` file or an Orbax directory of `jpaged.models.convert`.

    Raises:
        ValueError: naming file and field or tensor: a configuration that is not understood, or a tensor that
            is missing, unknown or ill-shaped. No weight has been read then.
    """
    if isinstance(source, (str, Path)):
        source = open_source(source)
    if isinstance(source, GGUFSource):
        return _load_gguf(source)
    if isinstance(source, HuggingFaceSource):
        return _load_huggingface(source)
    return _load_packed(source)


def _load_huggingface(source: HuggingFaceSource) -> Checkpoint:
    raw = source.metadata["config"]
    config = parse_hf_config(raw, source.metadata["generation_config"], str(source.path / "config.json"))
    names, prefix = FAMILIES[config.family].hf_names, ""
    if "text_config" in raw:
        prefix = next((p for p in _NESTED_PREFIXES if p + names["embed"] in source.names()), "")
    names = {role: prefix + name for role, name in names.items()}
    # the flag decides, as in transformers; a head that is stored as well is compared when weights are read
    spare = names["head"] if config.tie_word_embeddings and names["head"] in source.names() else None
    plan = _Plan(_declared(source, config), names)
    harmless = {name for name in source.names() if _HARMLESS.fullmatch(name)}
    _check(source, plan, harmless, {} if spare is None else {spare: (config.vocab_size, config.hidden_size)})
    return Checkpoint(source, config, source.path, plan, spare)


def _load_gguf(source: GGUFSource) -> Checkpoint:
    factors = None
    if _GGUF_ROPE_FACTORS in source.names():
        factors = source.read(_GGUF_ROPE_FACTORS)
        if factors.ndim != 1:
            raise ValueError(f"tensor {_GGUF_ROPE_FACTORS!r} of {source.path} has shape {factors.shape}, not one axis")
    tied = _GGUF_HEAD not in source.names()
    try:
        config = parse_gguf_config(source.metadata, None if factors is None else factors.tolist(), tied=tied)
    except ValueError as error:
        raise ValueError(f"{source.path}: {error}") from error
    family = FAMILIES[config.family]
    plan = _Plan(_declared(source, config), family.gguf_names, interleaved=family.gguf_interleaved)
    _check(source, plan, {_GGUF_ROPE_FACTORS}, {})
    tokenizer = {key: value for key, value in source.metadata.items() if key.startswith("tokenizer.")}
    return Checkpoint(source, config, tokenizer, plan)


def _load_packed(source: TensorSource) -> Checkpoint:
    """A source whose tensors are weights already: what `jpaged.models.convert` wrote."""
    stored = source.metadata.get("config")
    if not isinstance(stored, Mapping):
        raise ValueError(f"{source.path} has no model configuration in its metadata: it was not saved by save_orbax")
    config = config_from_json(stored, str(source.path))
    plan = _Plan(_declared(source, config), {}, packed=True)
    _check(source, plan, set(), {})
    files = Path(getattr(source, "files", source.path))
    tokenizer: Path | dict[str, Any] = files
    if (files / GGUF_TOKENIZER_FILE).is_file():
        tokenizer = json.loads((files / GGUF_TOKENIZER_FILE).read_text(encoding="utf-8"))
    return Checkpoint(source, config, tokenizer, plan)


def _declared(source: TensorSource, config: ModelConfig) -> dict[str, Weight]:
    if config.num_layers > len(source.names()):  # a damaged count must not become a plan of its size
        raise ValueError(
            f"{source.path} says that it has {config.num_layers} layers, but it stores {len(source.names())} tensors"
        )
    return declared(config)


def _check(source: TensorSource, plan: _Plan, harmless: set[str], extra: dict[str, tuple[int, ...]]) -> None:
    """Every planned tensor is there in its shape, and nothing else is. `extra` is read beside the plan."""
    stored = source.names()
    planned = {name: part.shape for weight in plan.weights.values() for name, part in plan.parts(weight)} | extra
    missing = [name for name in planned if name not in stored]
    if missing:
        raise ValueError(f"{source.path} lacks {_some(missing)}, which its configuration calls for")
    unknown = [name for name in stored if name not in planned and name not in harmless]
    if unknown:
        raise ValueError(
            f"{stored[unknown[0]].file} holds {_some(unknown)}, which this model has no place for: its "
            "configuration and its weights do not belong together, or the model is not supported"
        )
    for name, shape in planned.items():
        if stored[name].shape != shape:
            raise ValueError(
                f"tensor {name!r} of {stored[name].file} has shape {stored[name].shape}; the configuration "
                f"of {source.path} calls for {shape}"
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return f"tensor {', '.join(map(repr, names[:3]))}{more}"


def _check_dtype(dtype: Any) -> np.dtype:
    if isinstance(dtype, str):
        dtype = _DTYPES.get(dtype, dtype)
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in _DTYPES:
        raise ValueError(f"dtype of parameters must be one of {', '.join(_DTYPES)}, or None; got {dtype!r}")
    return found


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array whose bytes XLA can use where they are."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _cast(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if dtype == np.float16 and np.isinf(cast).any() and np.isfinite(array).all():
        raise ValueError(f"tensor {name!r} holds values beyond the range of float16: use bfloat16 or float32")
    return cast


def resolve(model: str | Path) -> Path:
    """The file or directory of a model, fetched where it has to be.

    Args:
        model: a Hugging Face or Orbax directory, a `.gguf` file, the name of a built-in model, or a hub id.

    Raises:
        ValueError: it is none of these; the message lists what is possible.
        checkpoints.fetch.FetchError: it had to be fetched, and that failed.
    """
    path = Path(model).expanduser()
    if str(model) and (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
        return path
    if isinstance(model, str):
        if model in fetch.BUILTIN:
            return fetch.builtin(model)
        if (
            not path.exists()
            and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", model)
            and path.suffix != ".gguf"
        ):
            return fetch.hub(model)
    why = "is a file, but not a .gguf file" if path.is_file() else "is no file or directory"
    raise ValueError(
        f"model {str(model)!r} {why}, and no known name. A model is: a directory with config.json and "
        "safetensors files, a directory of `jpaged convert`, a .gguf file, one of "
        f"{', '.join(fetch.BUILTIN)}, or a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct"
    )
