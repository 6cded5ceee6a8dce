"""Stored tensors to parameters: which file tensors make which parameter, and how.

The whole plan is checked by names and shapes before the first weight is read; then parameters come one at a
time, so that the host holds one of them beside what the caller keeps.

Parameters have these names and shapes, every matrix as [out, in]:

    embed                   [vocab, hidden]
    layers.{i}.attn_norm    [hidden]
    layers.{i}.qkv          [kv_heads, group + 2, head_dim, hidden]   queries of a KV head, its key, its value
    layers.{i}.o            [hidden, heads * head_dim]
    layers.{i}.mlp_norm     [hidden]
    layers.{i}.gate_up      [2, intermediate, hidden]
    layers.{i}.down         [hidden, intermediate]
    final_norm              [hidden]
    head                    [vocab, hidden]                           only where the embedding is not reused
"""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints import GGUFSource, HuggingFaceSource, TensorSource, fetch, open_source
from jpaged.models.registry import parse_gguf_config, parse_hf_config
from jpaged.models.spec import ModelConfig, RopeScaling

_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

# role -> stored name; the roles of a layer have {i} in their names
_HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "final_norm": "model.norm.weight",
    "attn_norm": "model.layers.{i}.input_layernorm.weight",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "q": "model.layers.{i}.self_attn.q_proj.weight",
    "k": "model.layers.{i}.self_attn.k_proj.weight",
    "v": "model.layers.{i}.self_attn.v_proj.weight",
    "o": "model.layers.{i}.self_attn.o_proj.weight",
    "gate": "model.layers.{i}.mlp.gate_proj.weight",
    "up": "model.layers.{i}.mlp.up_proj.weight",
    "down": "model.layers.{i}.mlp.down_proj.weight",
}
_GGUF_NAMES = {
    "embed": "token_embd.weight",
    "head": "output.weight",
    "final_norm": "output_norm.weight",
    "attn_norm": "blk.{i}.attn_norm.weight",
    "mlp_norm": "blk.{i}.ffn_norm.weight",
    "q": "blk.{i}.attn_q.weight",
    "k": "blk.{i}.attn_k.weight",
    "v": "blk.{i}.attn_v.weight",
    "o": "blk.{i}.attn_output.weight",
    "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight",
    "down": "blk.{i}.ffn_down.weight",
}
_GGUF_ROPE_FACTORS = "rope_freqs.weight"
# where the language model hides in a checkpoint whose configuration has a text_config
_NESTED_PREFIXES = ("", "language_model.")
# buffers that older versions saved; they follow from the configuration
_HARMLESS = re.compile(r"(?:.*\.)?rotary_emb\.inv_freq")

_GGUF_TOKENIZER_FILE = "gguf_tokenizer.json"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True)
class _Parameter:
    """How one parameter is made: `build` gets the stored tensors in the order of `sources`."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    build: Callable[..., np.ndarray]


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
        plan: list[_Parameter],
        spare_head: str | None = None,
    ):
        self.path = source.path
        self.config = config
        self.tokenizer_source = tokenizer_source
        self._source = source
        self._plan = plan
        self._spare_head = spare_head

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters that `parameters` yields, in its order."""
        return {parameter.name: parameter.shape for parameter in self._plan}

    def parameters(self, dtype: Any = None) -> Iterator[tuple[str, np.ndarray]]:
        """Every parameter once, read when it is asked for.

        Args:
            dtype: "float32", "bfloat16" or "float16", or a NumPy dtype of these. None: as stored, quantised
                tensors as float32.

        Raises:
            ValueError: another dtype, a value that float16 cannot hold, or bytes that cannot be read.
        """
        wanted = None if dtype is None else _check_dtype(dtype)  # now, not at the first parameter
        return self._parameters(wanted)

    def _parameters(self, dtype: np.dtype | None) -> Iterator[tuple[str, np.ndarray]]:
        for parameter in self._plan:
            stored = [_cast(self._source.read(name), dtype, name) for name in parameter.sources]
            array = parameter.build(*stored)
            if parameter.name == "embed" and self._spare_head is not None:
                self._compare_spare_head(array)
            yield parameter.name, array

    def _compare_spare_head(self, embed: np.ndarray) -> None:
        name = str(self._spare_head)
        head = _cast(self._source.read(name), embed.dtype, name)
        if not np.array_equal(head, embed):
            warnings.warn(
                f"{self.path} says that its embeddings are tied, and stores a {name} that differs from "
                "them; the embeddings are used, as in transformers. If the stored head is meant, set "
                "tie_word_embeddings to false in config.json",
                stacklevel=4,
            )

    def __repr__(self) -> str:
        config = self.config
        return f"Checkpoint({str(self.path)!r}, family={config.family!r}, parameters={config.num_parameters:,})"


def load_checkpoint(source: str | Path | TensorSource) -> Checkpoint:
    """Opens a Hugging Face directory, a `.gguf` file or an Orbax directory of `save_orbax`.

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
    return _load_canonical(source)


def _load_huggingface(source: HuggingFaceSource) -> Checkpoint:
    raw = source.metadata["config"]
    config = parse_hf_config(raw, source.metadata["generation_config"], str(source.path / "config.json"))
    prefix = ""
    if "text_config" in raw:
        prefix = next((p for p in _NESTED_PREFIXES if p + _HF_NAMES["embed"] in source.names()), "")
    names = {role: prefix + name for role, name in _HF_NAMES.items()}
    # the flag decides, as in transformers; a head that is stored as well is compared when weights are read
    spare = names["head"] if config.tie_word_embeddings and names["head"] in source.names() else None
    plan = _plan(source, config, names, interleaved=False)
    harmless = {name for name in source.names() if _HARMLESS.fullmatch(name)}
    _check(source, plan, harmless, {} if spare is None else {spare: (config.vocab_size, config.hidden_size)})
    return Checkpoint(source, config, source.path, plan, spare)


def _load_gguf(source: GGUFSource) -> Checkpoint:
    factors = None
    if _GGUF_ROPE_FACTORS in source.names():
        factors = source.read(_GGUF_ROPE_FACTORS)
        if factors.ndim != 1:
            raise ValueError(f"tensor {_GGUF_ROPE_FACTORS!r} of {source.path} has shape {factors.shape}, not one axis")
    try:
        config = parse_gguf_config(source.metadata, None if factors is None else factors.tolist())
    except ValueError as error:
        raise ValueError(f"{source.path}: {error}") from error
    tied = _GGUF_NAMES["head"] not in source.names()
    config = dataclasses.replace(config, tie_word_embeddings=tied)
    plan = _plan(source, config, _GGUF_NAMES, interleaved=True)
    _check(source, plan, {_GGUF_ROPE_FACTORS}, {})
    tokenizer = {key: value for key, value in source.metadata.items() if key.startswith("tokenizer.")}
    return Checkpoint(source, config, tokenizer, plan)


def _load_canonical(source: TensorSource) -> Checkpoint:
    """A source whose tensors are parameters already: what `save_orbax` wrote."""
    stored = source.metadata.get("config")
    if not isinstance(stored, Mapping):
        raise ValueError(f"{source.path} has no model configuration in its metadata: it was not saved by save_orbax")
    try:
        scaling = stored.get("rope_scaling")
        factors = stored.get("rope_freq_factors")
        config = ModelConfig(
            **{
                **stored,
                "rope_scaling": None if scaling is None else RopeScaling(**scaling),
                "rope_freq_factors": None if factors is None else tuple(factors),
                "eos_token_ids": tuple(stored["eos_token_ids"]),
            }
        )
    except (TypeError, KeyError) as error:
        raise ValueError(f"the configuration in {source.path} is not of this version: {error}") from error
    plan = [
        _Parameter(p.name, p.shape, (p.name,), (p.shape,), lambda array: array)
        for p in _plan(source, config, _HF_NAMES, interleaved=False)
    ]
    _check(source, plan, set(), {})
    files = Path(getattr(source, "files", source.path))
    tokenizer: Path | dict[str, Any] = files
    if (files / _GGUF_TOKENIZER_FILE).is_file():
        tokenizer = json.loads((files / _GGUF_TOKENIZER_FILE).read_text(encoding="utf-8"))
    return Checkpoint(source, config, tokenizer, plan)


def _plan(
    source: TensorSource, config: ModelConfig, names: Mapping[str, str], *, interleaved: bool
) -> list[_Parameter]:
    """Every parameter of `config`, from tensors of `source` called as `names` says.

    `interleaved`: the rows of queries and keys are in the order of llama.cpp, where the two halves of a
    rotated pair are neighbours.
    """
    if config.num_layers > len(source.names()):  # a damaged count must not become a plan of its size
        raise ValueError(
            f"{source.path} says that it has {config.num_layers} layers, but it stores {len(source.names())} tensors"
        )
    hidden, inter, dim = config.hidden_size, config.intermediate_size, config.head_dim
    kv, group, q_rows = config.num_kv_heads, config.group, config.num_heads * config.head_dim

    def split_heads(rows: np.ndarray, rotated: bool) -> np.ndarray:  # [heads * dim, hidden] -> [heads, dim, hidden]
        if interleaved and rotated:
            return rows.reshape(-1, dim // 2, 2, hidden).swapaxes(1, 2).reshape(-1, dim, hidden)
        return rows.reshape(-1, dim, hidden)

    def pack_qkv(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        packed = np.empty((kv, group + 2, dim, hidden), np.result_type(q, k, v))
        packed[:, :group] = split_heads(q, True).reshape(kv, group, dim, hidden)
        packed[:, group] = split_heads(k, True)
        packed[:, group + 1] = split_heads(v, False)
        return packed

    def same(array: np.ndarray) -> np.ndarray:
        return array

    def pack_gate_up(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return np.stack((gate, up))

    table, norm = (config.vocab_size, hidden), (hidden,)
    plan = [_Parameter("embed", table, (names["embed"],), (table,), same)]
    for i in range(config.num_layers):
        stored = {role: name.format(i=i) for role, name in names.items()}
        matrix, kv_matrix = (inter, hidden), (kv * dim, hidden)
        for name, shape, roles, shapes, build in (
            ("attn_norm", norm, ("attn_norm",), (norm,), same),
            (
                "qkv",
                (kv, group + 2, dim, hidden),
                ("q", "k", "v"),
                ((q_rows, hidden), kv_matrix, kv_matrix),
                pack_qkv,
            ),
            ("o", (hidden, q_rows), ("o",), ((hidden, q_rows),), same),
            ("mlp_norm", norm, ("mlp_norm",), (norm,), same),
            ("gate_up", (2, inter, hidden), ("gate", "up"), (matrix, matrix), pack_gate_up),
            ("down", (hidden, inter), ("down",), ((hidden, inter),), same),
        ):
            sources = tuple(stored[role] for role in roles)
            plan.append(_Parameter(f"layers.{i}.{name}", shape, sources, shapes, build))
    plan.append(_Parameter("final_norm", norm, (names["final_norm"],), (norm,), same))
    if not config.tie_word_embeddings:
        plan.append(_Parameter("head", table, (names["head"],), (table,), same))
    return plan


def _check(source: TensorSource, plan: list[_Parameter], harmless: set[str], extra: dict[str, tuple[int, ...]]) -> None:
    """Every planned tensor is there in its shape, and nothing else is. `extra` is read beside the plan."""
    stored = source.names()
    planned = {
        name: shape for parameter in plan for name, shape in zip(parameter.sources, parameter.shapes, strict=True)
    } | extra
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


def _cast(array: np.ndarray, dtype: np.dtype | None, name: str) -> np.ndarray:
    if dtype is None:
        return array.astype(np.float32) if array.dtype == np.float64 else array
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if dtype == np.float16 and np.isinf(cast).any() and np.isfinite(array).all():
        raise ValueError(f"tensor {name!r} holds values beyond the range of float16: use bfloat16 or float32")
    return cast


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
        files[_GGUF_TOKENIZER_FILE] = json.dumps(dict(checkpoint.tokenizer_source))
    else:
        for name in _TOKENIZER_FILES:
            if (checkpoint.tokenizer_source / name).is_file():
                files[name] = (checkpoint.tokenizer_source / name).read_text(encoding="utf-8")
    metadata = {"config": dataclasses.asdict(checkpoint.config), "converted_from": checkpoint.path.name}
    return orbax.save(dst, dict(checkpoint.parameters(dtype)), metadata, files)


def convert(src: str | Path, dst: str | Path, dtype: Any = None) -> Path:
    """`save_orbax` of any model that `resolve` finds; raises what these two raise."""
    if Path(dst).exists():  # before a download or a long read
        raise ValueError(f"{dst} already exists: give a new directory")
    return save_orbax(dst, load_checkpoint(resolve(src)), dtype)


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
