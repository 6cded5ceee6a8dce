"""Stored tensors to parameters: the right ones, each once, lazily; and everything that is wrong is named."""

import dataclasses
import json
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoint_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTER,
    KV_HEADS,
    LAYERS,
    VOCAB,
    gguf_metadata,
    gguf_tensors,
    hf_config,
    hf_tensors,
    write_gguf,
    write_hf,
)  # fmt: skip

from checkpoints import fetch, open_source
from jpaged.models import load as loading
from jpaged.models.convert import convert, save_orbax
from jpaged.models.load import load_checkpoint, resolve
from jpaged.models.spec import ModelConfig, RopeScaling


def expected_shapes(kv_heads=KV_HEADS, head=True):
    layer = {
        "attn_norm": (HIDDEN,),
        "qkv": (kv_heads, HEADS // kv_heads + 2, HEAD_DIM, HIDDEN),
        "o": (HIDDEN, HEADS * HEAD_DIM),
        "mlp_norm": (HIDDEN,),
        "gate_up": (2, INTER, HIDDEN),
        "down": (HIDDEN, INTER),
    }
    shapes = {"embed": (VOCAB, HIDDEN), "final_norm": (HIDDEN,)} | ({"head": (VOCAB, HIDDEN)} if head else {})
    return shapes | {f"layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}


def parameters(path, dtype="float32"):
    pairs = list(load_checkpoint(path).parameters(dtype))
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_every_parameter_holds_what_its_name_says(tmp_path, kv_heads):
    tensors = hf_tensors(kv_heads=kv_heads)
    found = parameters(write_hf(tmp_path, hf_config(num_key_value_heads=kv_heads), tensors))
    assert {name: a.shape for name, a in found.items()} == expected_shapes(kv_heads)
    np.testing.assert_array_equal(found["embed"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(found["head"], tensors["lm_head.weight"])
    np.testing.assert_array_equal(found["final_norm"], tensors["model.norm.weight"])
    x = np.random.default_rng(1).standard_normal(HIDDEN, dtype=np.float32)
    group = HEADS // kv_heads
    for i in range(LAYERS):
        stored = {n.split(f"layers.{i}.")[1]: t for n, t in tensors.items() if f"layers.{i}." in n}
        qkv = found[f"layers.{i}.qkv"]
        for part, at in (
            ("q", slice(0, group)),
            ("k", slice(group, group + 1)),
            ("v", slice(group + 1, None)),
        ):
            rows = stored[f"self_attn.{part}_proj.weight"]
            np.testing.assert_allclose((qkv[:, at] @ x).reshape(-1), rows @ x, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found[f"layers.{i}.o"], stored["self_attn.o_proj.weight"])
        np.testing.assert_array_equal(found[f"layers.{i}.gate_up"][0], stored["mlp.gate_proj.weight"])
        np.testing.assert_array_equal(found[f"layers.{i}.gate_up"][1], stored["mlp.up_proj.weight"])
        np.testing.assert_array_equal(found[f"layers.{i}.down"], stored["mlp.down_proj.weight"])
        np.testing.assert_array_equal(found[f"layers.{i}.attn_norm"], stored["input_layernorm.weight"])
        np.testing.assert_array_equal(found[f"layers.{i}.mlp_norm"], stored["post_attention_layernorm.weight"])


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_gguf_and_shards_hold_the_same_model(tmp_path, kv_heads):
    tensors, config = hf_tensors(kv_heads=kv_heads), hf_config(num_key_value_heads=kv_heads)
    expected = parameters(write_hf(tmp_path / "hf", config, tensors))
    assert_equal(parameters(write_hf(tmp_path / "shards", config, tensors, shards=3)), expected)
    metadata = gguf_metadata(llama__attention__head_count_kv=kv_heads)
    gguf = write_gguf(tmp_path / "m.gguf", metadata, gguf_tensors(tensors, kv_heads))
    assert_equal(parameters(gguf), expected)
    from_hf, from_gguf = load_checkpoint(tmp_path / "hf").config, load_checkpoint(gguf).config
    eps = from_gguf.rms_norm_eps  # GGUF keeps it as float32
    assert np.float32(eps) == np.float32(from_hf.rms_norm_eps)
    assert dataclasses.replace(from_gguf, rms_norm_eps=from_hf.rms_norm_eps) == from_hf


# LD-01: whether the embedding is the head


def test_tied_without_a_stored_head_has_no_head(tmp_path):
    write_hf(tmp_path, hf_config(tie_word_embeddings=True), hf_tensors(head=False))
    assert {name: a.shape for name, a in parameters(tmp_path).items()} == expected_shapes(head=False)
    assert load_checkpoint(tmp_path).config.tie_word_embeddings


def test_tied_with_the_embedding_stored_twice_is_silent(tmp_path):
    tensors = hf_tensors(head=False)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    write_hf(tmp_path, hf_config(tie_word_embeddings=True), tensors)
    assert "head" not in parameters(tmp_path)


def test_tied_with_another_head_stored_uses_the_embedding_and_says_so(tmp_path):
    tensors = hf_tensors()
    write_hf(tmp_path, hf_config(tie_word_embeddings=True), tensors)
    with pytest.warns(UserWarning, match=r"lm_head\.weight that differs.*set tie_word_embeddings to false"):
        found = parameters(tmp_path)
    assert "head" not in found
    np.testing.assert_array_equal(found["embed"], tensors["model.embed_tokens.weight"])


def test_untied_without_a_head_is_an_error(tmp_path):
    write_hf(tmp_path, tensors=hf_tensors(head=False))
    with pytest.raises(ValueError, match=r"lacks tensor 'lm_head\.weight'"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_the_flag_is_read_where_the_text_model_is_described(tmp_path, prefix):
    inner = hf_config(tie_word_embeddings=False)
    outer = {"model_type": "wrapper", "text_config": inner, "tie_word_embeddings": True, "eos_token_id": 9}
    tensors = hf_tensors(prefix=prefix)
    found = parameters(write_hf(tmp_path / "a", outer, tensors))
    np.testing.assert_array_equal(found["head"], tensors[prefix + "lm_head.weight"])
    assert load_checkpoint(tmp_path / "a").config.eos_token_ids == (2,)
    outer = {"text_config": hf_config(tie_word_embeddings=True), "tie_word_embeddings": False}
    assert "head" not in parameters(write_hf(tmp_path / "b", outer, hf_tensors(head=False, prefix=prefix)))
    outer["vision_config"] = {}
    with pytest.raises(ValueError, match=r"not understood: vision_config"):
        load_checkpoint(write_hf(tmp_path / "c", outer, hf_tensors(head=False)))


def test_gguf_says_tied_by_leaving_the_head_out(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tensors=gguf_tensors(hf_tensors(head=False)))
    assert load_checkpoint(path).config.tie_word_embeddings
    assert "head" not in parameters(path)


# LD-02: every tensor exactly once


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
    tensors = hf_tensors()
    del tensors[name]
    with pytest.raises(ValueError, match=rf"{tmp_path}.* lacks tensor '{name}'"):
        load_checkpoint(write_hf(tmp_path, tensors=tensors))


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight"])
def test_an_unknown_tensor_is_named_with_its_file(tmp_path, name):
    tensors = hf_tensors() | {name: np.zeros(HIDDEN, np.float32)}
    with pytest.raises(ValueError, match=rf"-of-00002\.safetensors holds tensor '{name}'"):
        load_checkpoint(write_hf(tmp_path, tensors=tensors, shards=2))


def test_buffers_that_follow_from_the_configuration_are_accepted(tmp_path):
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(LAYERS)}
    tensors = hf_tensors()
    expected = parameters(write_hf(tmp_path / "a", tensors=tensors))
    assert_equal(parameters(write_hf(tmp_path / "b", tensors=tensors | buffers)), expected)


def test_an_ill_shaped_tensor_is_named_with_both_shapes(tmp_path):
    tensors = hf_tensors()
    tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((INTER, HIDDEN), np.float32)
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.mlp\.down_proj\.weight'.*\(64, 32\).*\(32, 64\)"):
        load_checkpoint(write_hf(tmp_path, tensors=tensors))


def test_gguf_errors_name_the_tensor_and_the_file(tmp_path):
    tensors = gguf_tensors(hf_tensors())
    bias = tensors | {"blk.0.attn_q.bias": np.zeros(HIDDEN, np.float32)}
    with pytest.raises(ValueError, match=r"a\.gguf holds tensor 'blk\.0\.attn_q\.bias'"):
        load_checkpoint(write_gguf(tmp_path / "a.gguf", tensors=bias))
    del tensors["output_norm.weight"]
    with pytest.raises(ValueError, match=r"b\.gguf lacks tensor 'output_norm\.weight'"):
        load_checkpoint(write_gguf(tmp_path / "b.gguf", tensors=tensors))


class Spy:
    """A source that counts what is read."""

    def __init__(self, source):
        self.source, self.reads = source, Counter()

    def __getattr__(self, name):
        return getattr(self.source, name)

    def read(self, name, rows=None):
        self.reads[name] += 1
        return self.source.read(name, rows)


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_weights_are_read_once_and_only_when_asked_for(tmp_path, kind):
    path = write_hf(tmp_path / "hf") if kind == "hf" else write_gguf(tmp_path / "m.gguf")
    checkpoint = load_checkpoint(path)
    spy = checkpoint._source = Spy(checkpoint._source)
    stream = checkpoint.parameters("float32")
    assert not spy.reads
    next(stream)
    assert sum(spy.reads.values()) == 1
    list(stream)
    assert spy.reads == dict.fromkeys(spy.names(), 1)


def test_parameters_come_in_the_dtype_asked_for(tmp_path):
    tensors = {n: t.astype(ml_dtypes.bfloat16) for n, t in hf_tensors().items()}
    write_hf(tmp_path, tensors=tensors)
    for dtype in ("float32", "bfloat16", "float16", np.float32, ml_dtypes.bfloat16):
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        assert {a.dtype.name for a in parameters(tmp_path, dtype).values()} == {name}
    assert {a.dtype for a in parameters(tmp_path, None).values()} == {np.dtype(ml_dtypes.bfloat16)}
    for wrong in ("int8", "float64", "no dtype", 3):
        with pytest.raises(ValueError, match="one of float32, bfloat16, float16"):
            load_checkpoint(tmp_path).parameters(wrong)


def test_a_value_beyond_float16_is_an_error_not_an_infinity(tmp_path):
    tensors = hf_tensors()
    tensors["model.norm.weight"][3] = 1e6
    write_hf(tmp_path, tensors=tensors)
    with pytest.raises(ValueError, match=r"'model\.norm\.weight'.*use bfloat16 or float32"):
        parameters(tmp_path, "float16")


# Orbax, and finding models


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_a_converted_model_is_the_same_model(tmp_path, kind):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
    if kind == "hf":
        src = write_hf(tmp_path / "hf", hf_config(rope_scaling=scaling, eos_token_id=[2, 5]))
        for name in ("tokenizer.json", "special_tokens_map.json", "added_tokens.json"):  # U-19
            (src / name).write_text("{}")
        (src / "chat_template.jinja").write_text("{{ messages }}")
    else:
        factors = {"rope_freqs.weight": np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)}
        src = write_gguf(tmp_path / "m.gguf", tensors=gguf_tensors(hf_tensors()) | factors)
    dst = convert(src, tmp_path / "saved")
    before, after = load_checkpoint(src), load_checkpoint(resolve(str(dst)))
    assert after.config == before.config
    assert_equal(dict(after.parameters()), dict(before.parameters()))
    assert {a.dtype.name for _, a in after.parameters("bfloat16")} == {"bfloat16"}
    if kind == "hf":
        assert (after.tokenizer_source / "chat_template.jinja").read_text() == "{{ messages }}"
        for name in ("tokenizer.json", "special_tokens_map.json", "added_tokens.json"):
            assert (after.tokenizer_source / name).read_text() == "{}"
    else:
        assert after.tokenizer_source == before.tokenizer_source
        assert "tokenizer.ggml.tokens" in after.tokenizer_source
    with pytest.raises(ValueError, match="already exists"):
        convert(src, dst)


def test_a_converted_model_in_bfloat16(tmp_path):
    save_orbax(tmp_path / "saved", load_checkpoint(write_hf(tmp_path / "hf")), "bfloat16")
    assert {a.dtype.name for _, a in load_checkpoint(tmp_path / "saved").parameters()} == {"bfloat16"}


def test_an_orbax_directory_of_something_else_is_refused(tmp_path):
    from checkpoints import orbax

    orbax.save(tmp_path / "other", {"x": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match="not saved by save_orbax"):
        load_checkpoint(tmp_path / "other")
    write_hf(tmp_path / "hf")
    saved = convert(tmp_path / "hf", tmp_path / "saved")
    description = json.loads((saved / "checkpoint.json").read_text())
    del description["arrays"]["layers.1.o"]
    (saved / "checkpoint.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"lacks tensor 'layers\.1\.o'"):
        load_checkpoint(saved)
    description["metadata"]["config"]["colour"] = "green"
    (saved / "checkpoint.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"not of this version.*colour"):
        load_checkpoint(saved)


def test_resolve_finds_files_directories_names_and_hub_ids(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "builtin", lambda name: tmp_path / f"{name}.gguf")
    monkeypatch.setattr(fetch, "hub", lambda repo_id: tmp_path / repo_id)
    directory, file = write_hf(tmp_path / "hf"), write_gguf(tmp_path / "m.gguf")
    assert resolve(directory) == resolve(str(directory)) == directory
    assert resolve(file) == resolve(str(file)) == file
    assert resolve("smollm2-135m") == tmp_path / "smollm2-135m.gguf"
    assert resolve("HuggingFaceTB/SmolLM2-135M") == tmp_path / "HuggingFaceTB/SmolLM2-135M"
    monkeypatch.chdir(tmp_path)
    assert resolve("hf") == loading.Path("hf")
    (tmp_path / "m.bin").write_bytes(b"")
    for wrong in (
        "gpt-9",
        "./no/such",
        "/no/such",
        "a/b/c",
        "org/m.gguf",
        "m.bin",
        "",
        loading.Path("org/name"),
    ):
        with pytest.raises(ValueError, match=r"A model is: .*config\.json.*\.gguf.*smollm2-135m.*hub id"):
            resolve(wrong)


def test_a_checkpoint_describes_itself(tmp_path):
    checkpoint = load_checkpoint(open_source(write_hf(tmp_path)))
    assert "family='llama'" in repr(checkpoint)
    assert f"{checkpoint.config.num_parameters:,}" in repr(checkpoint)
    assert sum(int(np.prod(s)) for s in checkpoint.shapes().values()) == checkpoint.config.num_parameters
    assert isinstance(checkpoint.config, ModelConfig)
    assert RopeScaling.KINDS == ("linear", "llama3")


def test_an_absurd_number_of_layers_is_refused_before_it_is_planned(tmp_path):
    """LD-04: a damaged count must not take the memory of two billion layers."""
    file = write_gguf(tmp_path / "m.gguf", gguf_metadata(llama__block_count=2**31 - 1))
    with pytest.raises(ValueError, match=r"m\.gguf says that it has 2147483647 layers, but it stores \d+ tensors"):
        load_checkpoint(file)


@pytest.fixture(scope="module")
def headers(tmp_path_factory):
    """A small file of each kind, and how many of its bytes come before the weights."""
    path = tmp_path_factory.mktemp("headers")
    gguf = write_gguf(path / "m.gguf").read_bytes()
    safetensors = (write_hf(path / "hf") / "model.safetensors").read_bytes()
    tables = gguf.index(b"output.weight") + 60, int.from_bytes(safetensors[:8], "little") + 8
    return {"m.gguf": (gguf, tables[0]), "hf/model.safetensors": (safetensors, tables[1])}, path


@pytest.mark.parametrize("name", ["m.gguf", "hf/model.safetensors"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_header_is_a_value_error_or_harmless(headers, name, data):
    files, path = headers
    content, table = files[name]
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, table - 1))
        damaged[at] = data.draw(st.sampled_from([0, 1, 8, 9, 127, 128, 255, damaged[at] ^ 1]))
    (path / name).write_bytes(damaged)
    try:
        checkpoint = load_checkpoint(path / name.removesuffix("/model.safetensors"))
    except ValueError:
        return
    assert {name: array.shape for name, array in checkpoint.parameters()} == checkpoint.shapes()
