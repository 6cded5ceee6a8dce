"""Reading configurations: typed fields, and what several families have in common.

A field that is not understood is refused unless it is known not to change the mathematics: a model that runs
without an error and answers nonsense is the worst outcome.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.models.spec import RopeScaling

#: Read in training, in generation by other programs, or not at all: no effect on the forward pass.
HF_HARMLESS = frozenset(
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


class Fields:
    """Typed reading of a mapping; remembers what was read, so that the rest can be refused.

    Args:
        place: what to call the mapping in errors.
        prefix: what stands before each key in the file.
    """

    def __init__(self, values: Mapping[str, Any], place: str, prefix: str = ""):
        self.values = values
        self.place = place
        self.prefix = prefix
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

    def only(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuses a field of `allowed` that is there with a value that is not listed for it."""
        for key, values in allowed.items():
            if key in self.values and self.get(key) not in values:
                raise self.wrong(key, self.values[key], f"{values[0]!r} (anything else is not supported)")

    def refuse_others(self, harmless: frozenset[str] = frozenset()) -> None:
        """Refuses every field that was neither read nor is one of `harmless`."""
        refuse_unknown({self.prefix + key for key in set(self.values) - self.seen - harmless}, self.place)

    def wrong(self, key: str, value: Any, allowed: str) -> ValueError:
        given = "missing" if value is None else repr(value)
        return ValueError(f"{self.prefix}{key} of {self.place} must be {allowed}; it is {given}")


def refuse_unknown(keys: set[str], place: str) -> None:
    if keys:
        raise ValueError(
            f"{place} has fields that are not understood: {', '.join(sorted(keys))}. They could change what "
            "the model computes; remove them only if you know that they do not"
        )


def hf_rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_theta` and `rope_scaling`, or from transformers 5's `rope_parameters`."""
    scalings = [_hf_scaling(fields, key) for key in ("rope_scaling", "rope_parameters") if fields.get(key)]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise ValueError(f"rope_scaling and rope_parameters of {fields.place} contradict each other")
    parameters = fields.get("rope_parameters") or {}
    theta = fields.number("rope_theta", 10_000.0)
    if "rope_theta" in parameters:
        inner = Fields(parameters, f"rope_parameters in {fields.place}").number("rope_theta")
        if fields.get("rope_theta") is not None and inner != theta:
            raise ValueError(f"rope_theta of {fields.place} is {theta}, and {inner} within rope_parameters")
        theta = inner
    return theta, scalings[0] if scalings else None


def _hf_scaling(fields: Fields, key: str) -> RopeScaling | None:
    if not isinstance(fields.values[key], Mapping):
        raise fields.wrong(key, fields.values[key], "an object")
    inner = Fields(fields.values[key], f"{key} in {fields.place}")
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
    inner.refuse_others()
    return scaling


def gguf_scaling(fields: Fields) -> RopeScaling | None:
    """Scaling from `rope.scaling.*`, or from `rope.scale_linear`, the older name of the factor."""
    kind = fields.get("rope.scaling.type")
    if kind not in (None, "none", "linear"):
        raise fields.wrong("rope.scaling.type", kind, "'none' or 'linear'")
    old = fields.number("rope.scale_linear", 1.0)  # the older name of the factor
    factor = fields.number("rope.scaling.factor", old)
    for key in ("rope.scaling.original_context_length", "rope.scaling.finetuned"):
        fields.get(key)  # read by yarn only
    return None if kind == "none" or factor == 1.0 else RopeScaling("linear", factor)
