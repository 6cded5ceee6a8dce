"""Which families there are, and which of them a checkpoint is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.models.family import Family, GgufFile, HfFiles
from jpaged.models.fields import HF_HARMLESS, Fields, refuse_unknown
from jpaged.models.llama import LLAMA
from jpaged.models.spec import ModelConfig, RopeScaling

#: every family, by its name
FAMILIES: Mapping[str, Family] = {family.name: family for family in (LLAMA,)}


def parse_hf_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, place: str = "config.json"
) -> ModelConfig:
    """The model that a Hugging Face configuration describes.

    Args:
        config: config.json. Where it has a `text_config`, that one describes the model, also whether its
            embeddings are tied.
        generation_config: generation_config.json; its end-of-sequence ids are added to those of `config`.
        place: what to call `config` in errors.

    Raises:
        ValueError: naming the field: missing, of another type, not supported, or not understood.
    """
    if isinstance(config.get("text_config"), Mapping):
        outer = {"text_config", "tie_word_embeddings", "bos_token_id", "eos_token_id"} | HF_HARMLESS
        refuse_unknown(set(config) - outer, place)
        inner = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
        return parse_hf_config({**inner, **config["text_config"]}, generation_config, f"text_config in {place}")
    known = {name: family for family in FAMILIES.values() for name in family.hf_architectures}
    types = {kind: name for family in FAMILIES.values() for name, kind in family.hf_architectures.items()}
    named = config.get("architectures") or [types.get(str(config.get("model_type")), config.get("model_type"))]
    if not isinstance(named, Sequence) or len(named) != 1 or named[0] not in known:
        raise ValueError(f"architectures of {place} is {named!r}; supported: {', '.join(known)}")
    generation = Fields(generation_config or {}, "generation_config.json")
    return known[named[0]].parse_hf(HfFiles(Fields(config, place), named[0], generation))


def parse_gguf_config(
    metadata: Mapping[str, Any], rope_factors: Sequence[float] | None = None, *, tied: bool = False
) -> ModelConfig:
    """The model that GGUF metadata describes.

    Args:
        metadata: keys and values of the file.
        rope_factors: see `GgufFile`.
        tied: the file has no head of its own.

    Raises:
        ValueError: naming the key: missing, of another type, not supported, or not understood.
    """
    known = {name: family for family in FAMILIES.values() for name in family.gguf_architectures}
    architecture = metadata.get("general.architecture")
    if architecture not in known or metadata.get("general.type", "model") != "model":
        raise ValueError(
            f"general.architecture is {architecture!r} and general.type "
            f"{metadata.get('general.type', 'model')!r}; supported: 'model' of {', '.join(known)}"
        )
    if metadata.get("split.count", 1) > 1:
        raise ValueError("split.count says the model is in several files: join them (llama-gguf-split --merge)")
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    factors = None if rope_factors is None else tuple(float(factor) for factor in rope_factors)
    fields = Fields(own, "the GGUF metadata", prefix)
    return known[architecture].parse_gguf(GgufFile(fields, metadata, factors, tied))


def config_from_json(stored: Mapping[str, Any], place: str) -> ModelConfig:
    """A ModelConfig from what JSON made of it.

    Raises:
        ValueError: it has other fields than this version's, or values that they cannot have; `place` says where.
    """
    try:
        scaling, factors = stored.get("rope_scaling"), stored.get("rope_freq_factors")
        return ModelConfig(
            **{
                **stored,
                "rope_scaling": None if scaling is None else RopeScaling(**scaling),
                "rope_freq_factors": None if factors is None else tuple(factors),
                "eos_token_ids": tuple(stored["eos_token_ids"]),
            }
        )
    except (TypeError, KeyError) as error:
        raise ValueError(f"the configuration in {place} is not of this version: {error}") from error
