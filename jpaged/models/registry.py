"""Which models are understood: Hugging Face and GGUF configuration fields to `ModelConfig`.

A field that is not understood is refused unless it is known not to change the mathematics: a model that runs
without an error and answers nonsense is the worst outcome.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.models.spec import ModelConfig, RopeScaling

#: Hugging Face architectures, and the family whose code runs them
HF_ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama"}
_MODEL_TYPES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
#: values of general.architecture; llama.cpp writes "llama" for Mistral as well
GGUF_ARCHITECTURES = ("llama",)

# Read in training, in generation by other programs, or not at all: no effect on the forward pass.
_HF_HARMLESS = frozenset(
    (
        "_attn_implementation_autoset", "_attn_implementation", "_commit_hash", "_name_or_path",
        "architectures", "attention_dropout", "bad_words_ids", "begin_suppress_tokens",
        "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype",
        "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
        "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "hidden_dropout", "id2label",
        "initializer_range", "is_decoder", "is_llama_config", "label2id", "length_penalty", "max_length",
        "max_sequence_length", "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups",
        "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
        "pad_token_id", "prefix", "pretraining_tp", "problem_type", "remove_invalid_values",
        "repetition_penalty", "resid_pdrop", "return_dict", "return_dict_in_generate", "sep_token_id",
        "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class",
        "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version",
        "typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
    )
)  # fmt: skip
# Fields that would change the mathematics, and the values under which they do not.
_HF_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", "swish"),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1, None),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}


class _Fields:
    """Typed reading of a mapping; remembers what was read, so that the rest can be refused."""

    def __init__(self, values: Mapping[str, Any], place: str):
        self.values = values
        self.place = place
        self.seen: set[str] = set()

    def get(self, key: str) -> Any:
        self.seen.add(key)
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, value, "an integer of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """None, an id or a list of ids; each within the vocabulary."""
        value = self.get(key)
        ids = () if value is None else value if isinstance(value, Sequence) else (value,)
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise self.wrong(key, value, f"token ids of the vocabulary, 0 to {vocab_size - 1}")
        return tuple(ids)

    def wrong(self, key: str, value: Any, allowed: str) -> ValueError:
        given = "missing" if value is None else repr(value)
        return ValueError(f"{key} of {self.place} must be {allowed}; it is {given}")


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
        outer = {"text_config", "tie_word_embeddings", "bos_token_id", "eos_token_id"} | _HF_HARMLESS
        _refuse_unknown(set(config) - outer, place)
        inner = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
        return parse_hf_config({**inner, **config["text_config"]}, generation_config, f"text_config in {place}")

    fields = _Fields(config, place)
    architecture = _architecture(config, place)
    mistral = architecture == "MistralForCausalLM"
    for key, allowed in _HF_ONLY.items():
        if key in config and fields.get(key) not in allowed:
            raise fields.wrong(key, config[key], f"{allowed[0]!r} (anything else is not supported)")
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    vocab_size = fields.integer("vocab_size")
    if fields.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"hidden_size ({hidden}) of {place} is no multiple of num_attention_heads ({heads}), and "
            "head_dim is missing"
        )
    theta, scaling = _hf_rope(fields)
    generation = _Fields(generation_config or {}, "generation_config.json")
    eos = fields.token_ids("eos_token_id", vocab_size) + generation.token_ids("eos_token_id", vocab_size)
    bos = fields.token_ids("bos_token_id", vocab_size)
    tied = fields.get("tie_word_embeddings")
    if tied not in (None, True, False):
        raise fields.wrong("tie_word_embeddings", tied, "true or false")
    result = ModelConfig(
        family=HF_ARCHITECTURES[architecture],
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        # transformers' default for Mistral is 8, whatever the number of heads: not to be guessed
        num_kv_heads=fields.integer("num_key_value_heads", None if mistral else heads),
        head_dim=fields.integer("head_dim", hidden // heads),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        tie_word_embeddings=bool(tied),
        sliding_window=_hf_window(fields, mistral),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )
    _refuse_unknown(set(config) - fields.seen - _HF_HARMLESS, place)
    return result


def _architecture(config: Mapping[str, Any], place: str) -> str:
    named = config.get("architectures") or [_MODEL_TYPES.get(str(config.get("model_type")), config.get("model_type"))]
    if not isinstance(named, Sequence) or len(named) != 1 or named[0] not in HF_ARCHITECTURES:
        raise ValueError(f"architectures of {place} is {named!r}; supported: {', '.join(HF_ARCHITECTURES)}")
    return named[0]


def _hf_window(fields: _Fields, mistral: bool) -> int | None:
    # transformers gives Mistral a window of 4096 where the file does not mention one, and Llama none at all
    window = fields.get("sliding_window")
    if mistral and "sliding_window" not in fields.values:
        window = 4096
    if window is not None and not mistral:
        raise fields.wrong("sliding_window", window, "null for LlamaForCausalLM, which has no window")
    if window is not None:
        window = fields.integer("sliding_window", window)
    kinds = fields.get("layer_types")
    expected = "full_attention" if window is None else "sliding_attention"
    if kinds is not None and set(kinds) != {expected}:
        raise fields.wrong("layer_types", kinds, f"{expected!r} in every layer, as sliding_window says")
    return window


def _hf_rope(fields: _Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_theta` and `rope_scaling`, or from transformers 5's `rope_parameters`."""
    scalings = [_hf_scaling(fields, key) for key in ("rope_scaling", "rope_parameters") if fields.get(key)]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise ValueError(f"rope_scaling and rope_parameters of {fields.place} contradict each other")
    parameters = fields.get("rope_parameters") or {}
    theta = fields.number("rope_theta", 10_000.0)
    if "rope_theta" in parameters:
        inner = _Fields(parameters, f"rope_parameters in {fields.place}").number("rope_theta")
        if fields.get("rope_theta") is not None and inner != theta:
            raise ValueError(f"rope_theta of {fields.place} is {theta}, and {inner} within rope_parameters")
        theta = inner
    return theta, scalings[0] if scalings else None


def _hf_scaling(fields: _Fields, key: str) -> RopeScaling | None:
    if not isinstance(fields.values[key], Mapping):
        raise fields.wrong(key, fields.values[key], "an object")
    inner = _Fields(fields.values[key], f"{key} in {fields.place}")
    named = {inner.get("rope_type"), inner.get("type")} - {None}
    if len(named) > 1:
        raise ValueError(f"{inner.place} has two kinds: {sorted(map(str, named))}")
    kind = named.pop() if named else "default" if key == "rope_parameters" else None
    if kind not in ("default", *RopeScaling.KINDS):
        raise inner.wrong("rope_type", kind, f"one of {('default', *RopeScaling.KINDS)}")
    inner.get("rope_theta")
    if inner.get("partial_rotary_factor") not in (None, 1):
        raise inner.wrong("partial_rotary_factor", inner.get("partial_rotary_factor"), "1")
    scaling = None
    if kind == "linear":
        scaling = RopeScaling("linear", inner.number("factor"))
        inner.get("original_max_position_embeddings")  # recorded by some tools; linear scaling does not read it
    elif kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            inner.number("factor"),
            inner.number("low_freq_factor"),
            inner.number("high_freq_factor"),
            inner.integer("original_max_position_embeddings"),
        )
    _refuse_unknown(set(inner.values) - inner.seen, inner.place)
    return scaling


def parse_gguf_config(metadata: Mapping[str, Any], rope_factors: Sequence[float] | None = None) -> ModelConfig:
    """The model that GGUF metadata describes.

    Args:
        metadata: keys and values of the file.
        rope_factors: the tensor `rope_freqs.weight`, by which rotary frequencies are divided: the form in
            which GGUF stores the scaling of Llama 3.1. [head_dim / 2], or None.

    Raises:
        ValueError: naming the key: missing, of another type, not supported, or not understood.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES or metadata.get("general.type", "model") != "model":
        raise ValueError(
            f"general.architecture is {architecture!r} and general.type "
            f"{metadata.get('general.type', 'model')!r}; supported: 'model' of "
            f"{', '.join(GGUF_ARCHITECTURES)}"
        )
    if metadata.get("split.count", 1) > 1:
        raise ValueError("split.count says the model is in several files: join them (llama-gguf-split --merge)")
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    fields = _Fields(own, f"{prefix}* in the GGUF metadata")
    hidden = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    only: dict[str, tuple[Any, ...]] = {
        "attention.value_length": (head_dim,),
        "rope.dimension_count": (head_dim,),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "attention.causal": (True,),
        "use_parallel_residual": (True, False),  # not read for this architecture
    }
    for key, allowed in only.items():
        if key in own and fields.get(key) not in allowed:
            raise fields.wrong(key, own[key], f"{allowed[0]} (anything else is not supported)")
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    vocab_size = fields.integer("vocab_size", len(tokens) or None)
    special = _Fields(metadata, "the GGUF metadata")
    ids = {
        name: special.token_ids(f"tokenizer.ggml.{name}_token_id", vocab_size)
        for name in ("bos", "eos", "eot", "eom", "unknown")
    }
    result = ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10_000.0),
        rope_scaling=_gguf_scaling(fields),
        rope_freq_factors=None if rope_factors is None else tuple(float(factor) for factor in rope_factors),
        max_position_embeddings=fields.integer("context_length"),
        # the file says it by leaving the head out; whoever reads the tensors knows
        tie_word_embeddings=False,
        sliding_window=fields.integer("attention.sliding_window") if "attention.sliding_window" in own else None,
        bos_token_id=ids["bos"][0] if ids["bos"] else None,
        eos_token_ids=tuple(dict.fromkeys(ids["eos"] + ids["eot"] + ids["eom"])),
    )
    _refuse_unknown({prefix + key for key in set(own) - fields.seen}, "the GGUF metadata")
    return result


def _gguf_scaling(fields: _Fields) -> RopeScaling | None:
    kind = fields.get("rope.scaling.type")
    if kind not in (None, "none", "linear"):
        raise fields.wrong("rope.scaling.type", kind, "'none' or 'linear'")
    old = fields.number("rope.scale_linear", 1.0)  # the older name of the factor
    factor = fields.number("rope.scaling.factor", old)
    for key in ("rope.scaling.original_context_length", "rope.scaling.finetuned"):
        fields.get(key)  # read by yarn only
    return None if kind == "none" or factor == 1.0 else RopeScaling("linear", factor)


def _refuse_unknown(keys: set[str], place: str) -> None:
    if keys:
        raise ValueError(
            f"{place} has fields that are not understood: {', '.join(sorted(keys))}. They could change what "
            "the model computes; remove them only if you know that they do not"
        )
