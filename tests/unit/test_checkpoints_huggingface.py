"""Hugging Face directories: the index is obeyed, and whatever is wrong is named."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.checkpoint_files import hf_config, hf_tensors, write_hf

from checkpoints import HuggingFaceSource, open_source

SHARD_2 = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_comes_back(tmp_path, shards):
    tensors = hf_tensors()
    source = open_source(write_hf(tmp_path, tensors=tensors, generation={"eos_token_id": [2, 3]}, shards=shards))
    assert isinstance(source, HuggingFaceSource)
    assert set(source.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert source.names()[name].shape == tensor.shape
        np.testing.assert_array_equal(source.read(name), tensor)
    assert source.metadata["config"] == hf_config()
    assert source.metadata["generation_config"] == {"eos_token_id": [2, 3]}


def test_half_precision_keeps_its_bits(tmp_path):
    bits = np.arange(32, dtype=np.uint16).reshape(4, 8) * 1999
    write_hf(tmp_path, tensors={"b": bits.view(ml_dtypes.bfloat16), "h": bits.view(np.float16)})
    source = HuggingFaceSource(tmp_path)
    assert source.read("b").dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(source.read("b").view(np.uint16), bits)
    np.testing.assert_array_equal(source.read("h").view(np.uint16), bits)


def test_a_missing_shard_is_named(tmp_path):
    write_hf(tmp_path, shards=3)
    (tmp_path / SHARD_2).unlink()
    with pytest.raises(ValueError, match=rf"lacks {SHARD_2}.*index"):
        HuggingFaceSource(tmp_path)


def test_a_tensor_that_the_index_promises_and_the_shard_lacks_is_named(tmp_path):
    write_hf(tmp_path, shards=3)
    index = tmp_path / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["model.promised.weight"] = SHARD_2
    index.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=rf"{SHARD_2} lacks tensor 'model\.promised\.weight'"):
        HuggingFaceSource(tmp_path)


def test_a_tensor_beside_the_index_is_named(tmp_path):
    write_hf(tmp_path, shards=3)
    index = tmp_path / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    del value["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r"safetensors holds tensor 'lm_head\.weight'.*does not place there"):
        HuggingFaceSource(tmp_path)


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/passwd", 3])
def test_an_index_cannot_point_elsewhere(tmp_path, place):
    write_hf(tmp_path / "m", shards=2)
    (tmp_path / "m/model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": place}}))
    with pytest.raises(ValueError, match="not a plain file name"):
        HuggingFaceSource(tmp_path / "m")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', "[1]", '{"weight', "\xff"])
def test_a_damaged_index_is_named(tmp_path, content):
    write_hf(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        HuggingFaceSource(tmp_path)


def test_two_answers_to_one_question_are_refused(tmp_path):
    write_hf(tmp_path, shards=2)
    save_file({"x": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="remove one"):
        HuggingFaceSource(tmp_path)


def test_a_file_cut_anywhere_is_an_error_that_names_it(tmp_path):
    path = write_hf(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    header = 8 + struct.unpack("<Q", data[:8])[0]
    for size in [0, 5, 8, *range(9, header + 50, 101), header, len(data) - 100, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors is not a whole"):
            HuggingFaceSource(tmp_path)


def test_an_absurd_header_length_is_an_error(tmp_path):
    path = write_hf(tmp_path) / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60) + path.read_bytes()[8:])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole"):
        HuggingFaceSource(tmp_path)


def test_an_element_type_that_is_not_read_is_named(tmp_path):
    write_hf(tmp_path, tensors={"fine": np.zeros(2, np.float32), "odd": np.zeros((2, 2), np.int8)})
    with pytest.raises(ValueError, match=r"'odd' of .*model\.safetensors is stored as I8; supported: .*BF16"):
        HuggingFaceSource(tmp_path)


def test_directories_that_are_no_model_say_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"it has pytorch_model\.bin: save the model again as safetensors"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json cannot be read as JSON"):
        open_source(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        open_source(tmp_path / "nowhere")


def test_an_unknown_tensor_is_named(tmp_path):
    with pytest.raises(ValueError, match="no tensor 'nothing'"):
        HuggingFaceSource(write_hf(tmp_path)).read("nothing")
