"""The Llama family: Llama 2 and 3, SmolLM2, Mistral. Its layers are those of `ModelConfig`: each has a window of
attention or none has, and heads of keys are as many as those of queries, fewer, or one."""

from __future__ import annotations

from collections.abc import Sequence

from jpaged.models.family import Family, GgufFile, HfFiles
from jpaged.models.fields import HF_HARMLESS, Fields, gguf_scaling, hf_rope
from jpaged.models.spec import ModelConfig

_LLAMA, _MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"

#: Stored names by role; `{i}` is the number of the layer.
HF_NAMES = {
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
GGUF_NAMES = {
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

#: Fields that would change the mathematics, and the values under which they do not.
_HF_ONLY: dict[str, tuple[object, ...]] = {
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


def parse_hf(files: HfFiles) -> ModelConfig:
    """The model that config.json describes."""
    fields, mistral = files.config, files.architecture == _MISTRAL
    fields.only(_HF_ONLY)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if fields.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"hidden_size ({hidden}) of {fields.place} is no multiple of num_attention_heads ({heads}), and "
            "head_dim is missing"
        )
    theta, scaling = hf_rope(fields)
    vocab_size = fields.integer("vocab_size")
    bos, eos = files.special_ids(vocab_size)
    config = ModelConfig(
        family="llama",
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
        tie_word_embeddings=files.tied(),
        sliding_window=_hf_window(fields, mistral),
        bos_token_id=bos,
        eos_token_ids=eos,
    )
    fields.refuse_others(HF_HARMLESS)
    return config


def _hf_window(fields: Fields, mistral: bool) -> int | None:
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
    if kinds is not None and (not isinstance(kinds, Sequence) or any(kind != expected for kind in kinds)):
        raise fields.wrong("layer_types", kinds, f"{expected!r} in every layer, as sliding_window says")
    return window


def parse_gguf(file: GgufFile) -> ModelConfig:
    """The model that the keys of a GGUF file describe."""
    fields = file.fields
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    fields.only(
        {
            "attention.value_length": (head_dim,),
            "rope.dimension_count": (head_dim,),
            "expert_count": (0,),
            "expert_used_count": (0,),
            "attention.causal": (True,),
            "use_parallel_residual": (True, False),  # not read for this architecture
        }
    )
    vocab_size = fields.integer("vocab_size", file.num_tokens)
    bos, eos = file.special_ids(vocab_size)
    window = fields.integer("attention.sliding_window") if "attention.sliding_window" in fields.values else None
    config = ModelConfig(
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
        rope_scaling=gguf_scaling(fields),
        rope_freq_factors=file.rope_factors,
        max_position_embeddings=fields.integer("context_length"),
        tie_word_embeddings=file.tied,
        sliding_window=window,
        bos_token_id=bos,
        eos_token_ids=eos,
    )
    fields.refuse_others()
    return config


LLAMA = Family(
    name="llama",
    hf_architectures={_LLAMA: "llama", _MISTRAL: "mistral"},
    gguf_architectures=("llama",),  # llama.cpp writes it for Mistral as well
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    gguf_interleaved=True,
    parse_hf=parse_hf,
    parse_gguf=parse_gguf,
)
