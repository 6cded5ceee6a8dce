"""Weights on their way from a file to their devices: how much of them is in memory, and what takes whose place."""

import gc
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.checkpoint_files import gguf_tensors, hf_config, hf_tensors, write_gguf, write_hf
from support.tiny import TINY, tiny_weights

from checkpoints import HuggingFaceSource, source
from jpaged.models.decoder import load_decoder, replace_weights
from jpaged.models.load import load_checkpoint
from jpaged.models.weights import declared

WIDE, VOCAB = 1024, 4096


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A checkpoint whose largest weight, the embedding, has 16 MiB in float32."""
    tensors = {name: np.zeros((0,), np.float32) for name in hf_tensors()}
    changes = {"hidden_size": WIDE, "vocab_size": VOCAB, "head_dim": 8, "tie_word_embeddings": True}
    for name in tensors:
        if "embed" in name:
            tensors[name] = np.ones((VOCAB, WIDE), np.float16)
        elif "norm" in name:
            tensors[name] = np.ones(WIDE, np.float16)
        elif "q_proj" in name or "gate" in name or "up" in name:
            tensors[name] = np.ones((32 if "q_proj" in name else 64, WIDE), np.float16)
        elif "k_proj" in name or "v_proj" in name:
            tensors[name] = np.ones((16, WIDE), np.float16)
        else:
            tensors[name] = np.ones((WIDE, 32 if "o_proj" in name else 64), np.float16)
    del tensors["lm_head.weight"]
    path = tmp_path_factory.mktemp("wide")
    return write_hf(path / "hf", hf_config(**changes), tensors)


def test_the_host_holds_one_weight_at_a_time(wide, monkeypatch):
    """Catches: a stored tensor read whole beside the weight that it becomes, a weight that is kept until the next one
    has been read."""
    monkeypatch.setattr(source, "PIECE_BYTES", 1 << 16)
    largest = 4 * VOCAB * WIDE
    checkpoint = load_checkpoint(wide)
    gc.collect()
    tracemalloc.start()
    try:
        for name, array in checkpoint.parameters("float32"):
            del name, array
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert largest <= peak < 1.05 * largest


def test_on_a_cpu_a_weight_is_the_array_that_was_read(tmp_path):
    """Catches: a second copy of every weight where XLA could use the first."""
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=gguf_tensors(hf_tensors())))
    places = {}

    def named():
        for name, array in checkpoint.parameters("float32"):
            places[name] = array.ctypes.data
            yield name, array
            del array

    _, params = load_decoder(checkpoint.config, named(), jnp.float32)
    found = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    assert places.keys() == declared(checkpoint.config).keys()
    assert set(places.values()) <= found


def test_weights_come_in_the_order_of_the_file(tmp_path):
    """Catches: a disk that seeks."""
    tensors = dict(reversed(gguf_tensors(hf_tensors()).items()))
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors))
    names = [name for name, _ in checkpoint.parameters()]
    assert names[-2:] == ["final_norm", "embed"] and names[0].startswith("layers.1.")


def test_a_weight_is_packed_the_same_in_pieces_of_any_size(tmp_path, monkeypatch):
    """Catches: rows of queries and keys put in the wrong place where a piece ends within a head."""
    files = [write_hf(tmp_path / "hf"), write_gguf(tmp_path / "m.gguf")]
    whole = [dict(load_checkpoint(file).parameters("float32")) for file in files]
    for size in (1, 3 * 4 * 32, 7 * 4 * 32):
        monkeypatch.setattr(source, "PIECE_BYTES", size)
        for file, expected in zip(files, whole, strict=True):
            for name, array in load_checkpoint(file).parameters("float32"):
                np.testing.assert_array_equal(array, expected[name], err_msg=name)


def test_a_file_that_is_cut_short_while_it_is_open_is_an_error(tmp_path):
    """A mapped page that is gone would end the process."""
    for name in ("hf", "m.gguf"):
        path = write_hf(tmp_path / name) if name == "hf" else write_gguf(tmp_path / name)
        file = path / "model.safetensors" if name == "hf" else path
        checkpoint = load_checkpoint(path)
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size // 2)
        with pytest.raises(ValueError, match=r"had [\d,]+ bytes when it was opened|cut short while it was open"):
            dict(checkpoint.parameters("float32"))


def test_replacing_weights_never_holds_two_of_one_name():
    """Catches: new weights beside the old ones; a device that holds another sharding or dtype than before."""
    _, params = load_decoder(TINY, tiny_weights(TINY).items(), jnp.bfloat16)
    size, most = sum(leaf.nbytes for leaf in jax.tree.leaves(params)), 0
    ids = {id(array) for array in jax.live_arrays()} - {id(leaf) for leaf in jax.tree.leaves(params)}

    def held():
        return sum(array.nbytes for array in jax.live_arrays() if id(array) not in ids)

    def named():
        nonlocal most
        for pair in tiny_weights(TINY, seed=1).items():
            yield pair
            most = max(most, held())

    params = replace_weights(params, TINY, named())
    assert most <= size
    _, expected = load_decoder(TINY, tiny_weights(TINY, seed=1).items(), jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    with pytest.raises(ValueError, match="parameters are missing: embed"):
        replace_weights(params, TINY, [(n, a) for n, a in tiny_weights(TINY).items() if n != "embed"])
    params = replace_weights(params, TINY, tiny_weights(TINY, seed=1).items())  # some of them were deleted
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_a_source_gives_pieces_that_cover_a_tensor(wide, monkeypatch):
    """Catches: rows left out or read twice."""
    opened = HuggingFaceSource(wide)
    name = "model.embed_tokens.weight"
    for size, count in ((1, VOCAB), (4 * WIDE * 1000, 5), (1 << 40, 1)):
        monkeypatch.setattr(source, "PIECE_BYTES", size)
        pieces = opened.pieces(name)
        assert len(pieces) == count
        assert [row for piece in pieces for row in range(piece.start, piece.stop)] == list(range(VOCAB))
    assert opened.read(name, slice(1, 3)).shape == (2, WIDE)
