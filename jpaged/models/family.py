"""What a family of models is to the rest: names, and how its configuration is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jpaged.models.fields import Fields
from jpaged.models.spec import ModelConfig


@dataclass(frozen=True)
class HfFiles:
    """config.json, its `architectures`, and generation_config.json."""

    config: Fields
    architecture: str
    generation: Fields

    def special_ids(self, vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
        """The id that begins a text, and those that end one, of both files."""
        eos = [id_ for file in (self.config, self.generation) for id_ in file.token_ids("eos_token_id", vocab_size)]
        bos = self.config.token_ids("bos_token_id", vocab_size)
        return bos[0] if bos else None, tuple(dict.fromkeys(eos))

    def tied(self) -> bool:
        """Whether the embedding is the head as well."""
        tied = self.config.get("tie_word_embeddings")
        if tied not in (None, True, False):
            raise self.config.wrong("tie_word_embeddings", tied, "true or false")
        return bool(tied)


@dataclass(frozen=True)
class GgufFile:
    """The keys of a GGUF file, and what its tensors say beside them.

    Attributes:
        fields: the keys of the architecture, without its name in front.
        metadata: all keys.
        rope_factors: of the tensor `rope_freqs.weight`, `[head_dim / 2]`, by which rotary frequencies are divided: the
            form in which GGUF stores the scaling of Llama 3.1.
        tied: there is no head, so the embedding is used.
    """

    fields: Fields
    metadata: Mapping[str, Any]
    rope_factors: tuple[float, ...] | None
    tied: bool

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the vocabulary; None where the file has none."""
        return len(self.metadata.get("tokenizer.ggml.tokens", ())) or None

    def special_ids(self, vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
        """The id that begins a text, and those that end one."""
        special = Fields(self.metadata, "the GGUF metadata")
        ids = {
            name: special.token_ids(f"tokenizer.ggml.{name}_token_id", vocab_size)
            for name in ("bos", "eos", "eot", "eom", "unknown")
        }
        return ids["bos"][0] if ids["bos"] else None, tuple(dict.fromkeys(ids["eos"] + ids["eot"] + ids["eom"]))


@dataclass(frozen=True)
class Family:
    """A family of models: data, and the two functions that read a configuration.

    Attributes:
        name: `ModelConfig.family`.
        hf_architectures: names of `architectures` in config.json, each with its `model_type`.
        gguf_architectures: values of `general.architecture`.
        hf_names, gguf_names: stored names of tensors by role (`weights.Part`); `{i}` is the number of the layer.
        gguf_interleaved: GGUF stores the rows of queries and keys in llama.cpp's order (`Weight.rows`).
        parse_hf, parse_gguf: the model that a configuration describes. They raise ValueError, naming the field, for one
            that is missing, of another type, not supported, or not understood.
    """

    name: str
    hf_architectures: Mapping[str, str]
    gguf_architectures: tuple[str, ...]
    hf_names: Mapping[str, str]
    gguf_names: Mapping[str, str]
    gguf_interleaved: bool
    parse_hf: Callable[[HfFiles], ModelConfig]
    parse_gguf: Callable[[GgufFile], ModelConfig]
