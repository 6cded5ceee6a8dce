"""Configurations: what is understood, what it means, and that everything else is refused by name."""

import numpy as np
import pytest
from support.checkpoint_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    VOCAB,
    gguf_metadata,
    gguf_tensors,
    hf_config,
    hf_tensors,
    write_gguf,
    write_hf,
)  # fmt: skip

from jpaged.models.layers import rope_frequencies
from jpaged.models.load import load_checkpoint
from jpaged.models.registry import parse_gguf_config, parse_hf_config
from jpaged.models.spec import RopeScaling

LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def gguf(**changes):
    return parse_gguf_config({"general.architecture": "llama", **gguf_metadata(**changes)})


def test_hugging_face_fields():
    config = parse_hf_config(hf_config(rope_theta=5e5, head_dim=None, tie_word_embeddings=True))
    assert (config.family, config.vocab_size, config.hidden_size) == ("llama", VOCAB, HIDDEN)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, 2, HEAD_DIM)
    assert (config.rope_theta, config.rope_scaling, config.sliding_window) == (5e5, None, None)
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (1, (2,), True)
    assert parse_hf_config(hf_config(head_dim=16)).head_dim == 16
    assert parse_hf_config(hf_config(num_key_value_heads=None)).num_kv_heads == HEADS
    assert parse_hf_config(hf_config(rope_theta=None)).rope_theta == 10_000
    assert parse_hf_config(hf_config(architectures=None)).family == "llama"


def test_mistral_and_its_window():
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert parse_hf_config(hf_config(**mistral, sliding_window=64)).sliding_window == 64
    assert parse_hf_config(hf_config(**mistral) | {"sliding_window": None}).sliding_window is None
    assert parse_hf_config(hf_config(**mistral)).sliding_window == 4096
    layers = hf_config(**mistral, sliding_window=64, layer_types=["sliding_attention"] * 2)
    assert parse_hf_config(layers).sliding_window == 64
    with pytest.raises(ValueError, match=r"layer_types.*'full_attention'"):
        parse_hf_config(hf_config(**mistral, sliding_window=64, layer_types=["sliding_attention", "full_attention"]))
    with pytest.raises(ValueError, match=r"sliding_window.*null for LlamaForCausalLM"):
        parse_hf_config(hf_config(sliding_window=64))
    with pytest.raises(ValueError, match=r"num_key_value_heads.*missing"):
        parse_hf_config(hf_config(**mistral, num_key_value_heads=None))


# LD-08: rope scaling


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, "rope_theta": None},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_llama3_scaling_under_every_name(fields):
    config = parse_hf_config(hf_config(**{"rope_theta": 5e5, **fields}))
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    assert config.rope_theta == 5e5


def test_other_kinds_of_scaling():
    assert parse_hf_config(hf_config(rope_scaling={"type": "linear", "factor": 4})).rope_scaling == RopeScaling(
        "linear", 4
    )
    for plain in ({"rope_scaling": {"rope_type": "default"}}, {"rope_parameters": {"rope_theta": 1e4}}):
        assert parse_hf_config(hf_config(**plain)).rope_scaling is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type of rope_scaling.*'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_type.*missing"),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3", **LLAMA3}}, "two kinds"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor.*missing"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "beta_fast": 32}}, "not understood: beta_fast"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor must be at least 1"),
        ({"rope_scaling": "linear"}, "rope_scaling.*an object"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "rope_theta"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}},
            "contradict",
        ),
    ],
)
def test_scaling_that_is_not_understood_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        parse_hf_config(hf_config(**fields))


def test_gguf_carries_llama3_scaling_as_factors(tmp_path):
    """The published inverse frequencies of Llama 3.2: head_dim 64, base 5e5, factor 32."""
    plain = 5e5 ** (-np.arange(0, 64, 2) / 64)
    wavelength = 2 * np.pi / plain
    smooth = (8192 / wavelength - 1) / (4 - 1)
    scaled = np.where(wavelength > 8192, 32.0, 1 / ((1 - smooth) / 32 + smooth))
    stored = np.where(wavelength < 8192 / 4, 1.0, scaled).astype(np.float32)
    metadata = gguf_metadata(
        llama__attention__key_length=64, llama__attention__value_length=64, llama__rope__dimension_count=64,
        llama__rope__freq_base=5e5, llama__attention__head_count=4, llama__attention__head_count_kv=2,
    )  # fmt: skip
    tensors = gguf_tensors(hf_tensors())
    for i in range(2):
        tensors[f"blk.{i}.attn_q.weight"] = np.zeros((256, HIDDEN), np.float32)
        tensors[f"blk.{i}.attn_k.weight"] = tensors[f"blk.{i}.attn_v.weight"] = np.zeros((128, HIDDEN), np.float32)
        tensors[f"blk.{i}.attn_output.weight"] = np.zeros((HIDDEN, 256), np.float32)
    tensors["rope_freqs.weight"] = stored
    config = load_checkpoint(write_gguf(tmp_path / "m.gguf", metadata, tensors)).config
    assert config.rope_scaling is None
    from_hf = hf_config(rope_theta=5e5, head_dim=64, rope_scaling={"rope_type": "llama3", **LLAMA3})
    published = {
        14: 0.003211446, 15: 0.001290548, 16: 0.0004295568, 17: 9.708288e-5, 18: 1.946164e-5, 31: 9.418307e-8,
    }  # fmt: skip
    for one in (config, parse_hf_config(from_hf)):
        found = rope_frequencies(one.layers[0].rope, one.head_dim)
        for i, value in published.items():
            assert found[i] == pytest.approx(value, rel=1e-6)
        assert found[18] == pytest.approx(plain[18] / 32, rel=1e-6)


@pytest.mark.parametrize("factors", [np.ones(3, np.float32), np.zeros(4, np.float32), np.ones((2, 2), np.float32)])
def test_wrong_rope_factors_are_refused(tmp_path, factors):
    path = write_gguf(tmp_path / "m.gguf", tensors=gguf_tensors(hf_tensors()) | {"rope_freqs.weight": factors})
    with pytest.raises(ValueError, match=r"m\.gguf.*|rope_freq"):
        load_checkpoint(path)


def test_gguf_linear_scaling_and_what_is_refused():
    linear = gguf(llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    assert linear.rope_scaling == gguf(llama__rope__scale_linear=4.0).rope_scaling == RopeScaling("linear", 4.0)
    assert gguf(llama__rope__scaling__type="none").rope_scaling is None
    with pytest.raises(ValueError, match=r"rope\.scaling\.type.*'yarn'"):
        gguf(llama__rope__scaling__type="yarn")


# fields that would change the mathematics


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_bias": True}, "attention_bias of config.json must be False.*True"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act of config.json must be 'silu'.*'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"residual_multiplier": 0.22, "logit_scale": 2}, "not understood: logit_scale, residual_multiplier"),
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*supported: LlamaForCausalLM, Mistral"),
        ({"architectures": None, "model_type": "gpt2"}, "'gpt2'"),
        ({"architectures": [], "model_type": None}, "architectures"),
        ({"hidden_size": None}, "hidden_size of config.json must be.*missing"),
        ({"hidden_size": "32"}, "hidden_size.*'32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers.*at least 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"num_attention_heads": 5}, "no multiple of num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_hugging_face_fields_that_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        parse_hf_config(hf_config(**fields))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama__expert_count": 8}, r"expert_count.*8"),
        ({"llama__rope__dimension_count": 4}, r"rope\.dimension_count"),
        ({"llama__attention__value_length": 4}, r"attention\.value_length"),
        ({"llama__logit_scale": 0.5}, r"not understood: llama\.logit_scale"),
        ({"llama__block_count": None}, r"block_count.*missing"),
        ({"llama__attention__head_count_kv": [2, 1]}, r"head_count_kv.*\[2, 1\]"),
        ({"general__architecture": "gemma"}, r"'gemma'.*supported"),
        ({"general__type": "adapter"}, r"'adapter'"),
        ({"split__count": 3}, r"several files"),
    ],
)
def test_gguf_keys_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        gguf(**changes)


def test_the_file_is_named(tmp_path):
    path = write_hf(tmp_path / "m", hf_config(mlp_bias=True))
    with pytest.raises(ValueError, match=rf"mlp_bias of {path}/config\.json"):
        load_checkpoint(path)
    with pytest.raises(ValueError, match=r"odd\.gguf: .*expert_count"):
        load_checkpoint(write_gguf(tmp_path / "odd.gguf", gguf_metadata(llama__expert_count=8)))


# special ids


def test_end_ids_from_both_files():
    assert parse_hf_config(hf_config(eos_token_id=[2, 3])).eos_token_ids == (2, 3)
    generation = {"eos_token_id": [3, 7], "temperature": 0.6}
    assert parse_hf_config(hf_config(), generation).eos_token_ids == (2, 3, 7)
    assert parse_hf_config(hf_config(eos_token_id=None), {"eos_token_id": 5}).eos_token_ids == (5,)
    assert parse_hf_config(hf_config(eos_token_id=None, bos_token_id=None)).bos_token_id is None
    assert gguf(tokenizer__ggml__eot_token_id=4).eos_token_ids == (2, 4)


@pytest.mark.parametrize("wrong", [VOCAB, -1, "2", [2, VOCAB], True])
def test_ids_outside_the_vocabulary_name_the_key(tmp_path, wrong):
    with pytest.raises(ValueError, match=r"eos_token_id of config\.json must be token ids of the vocabulary, 0 to 39"):
        parse_hf_config(hf_config(eos_token_id=wrong))
    with pytest.raises(ValueError, match=r"bos_token_id of config\.json"):
        parse_hf_config(hf_config(bos_token_id=wrong))
    with pytest.raises(ValueError, match=r"eos_token_id of generation_config\.json"):
        parse_hf_config(hf_config(), {"eos_token_id": wrong})


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom", "unknown"])
def test_gguf_ids_outside_the_vocabulary_name_file_and_key(tmp_path, name):
    metadata = gguf_metadata(**{f"tokenizer__ggml__{name}_token_id": VOCAB})
    path = write_gguf(tmp_path / "m.gguf", metadata)
    with pytest.raises(ValueError, match=rf"m\.gguf.*tokenizer\.ggml\.{name}_token_id"):
        load_checkpoint(path)
