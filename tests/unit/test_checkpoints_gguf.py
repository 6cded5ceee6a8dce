"""GGUF: bits right for every claimed type, and damage is an error that names the file, never a crash."""

import struct
import tracemalloc

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from support.checkpoint_files import gguf_metadata, gguf_tensors, hf_tensors, write_gguf

from checkpoints import GGUFSource
from checkpoints.gguf import CLAIMED_KINDS

QUANTISED = [kind for kind in CLAIMED_KINDS if kind not in ("F32", "F16", "BF16")]


def test_reads_what_the_reference_reader_reads(tmp_path):
    metadata = gguf_metadata(general__languages=["en", "français"], x__flags=[True, False], x__floats=[0.5, -2.0])
    path = write_gguf(tmp_path / "m.gguf", metadata)
    source, reference = GGUFSource(path), gguf.GGUFReader(path)
    expected = {key: f.contents() for key, f in reference.fields.items() if not key.startswith("GGUF.")}
    assert dict(source.metadata) == expected
    assert list(source.names()) == [t.name for t in reference.tensors]
    for tensor in reference.tensors:
        np.testing.assert_array_equal(source.read(tensor.name), tensor.data)
        assert source.names()[tensor.name].shape == tuple(tensor.shape[::-1])


def test_bfloat16_keeps_shape_and_bits(tmp_path):
    """LD-06: the reader gives raw bytes for this type."""
    bits = np.random.default_rng(0).integers(0, 2**16, (4, 8), dtype=np.uint16)
    path = write_gguf(tmp_path / "m.gguf", tensors={"x": (bits.view(np.uint8), Kind.BF16)})
    source = GGUFSource(path)
    assert source.names()["x"].shape == (4, 8)
    assert source.names()["x"].kind == "BF16"
    array = source.read("x")
    assert array.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(array.view(np.uint16), bits)


def test_plain_floats_keep_their_bits(tmp_path):
    half = np.arange(32, dtype=np.float16).reshape(2, 16)
    single = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 2, 2)
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", tensors={"h": half, "s": single}))
    assert source.read("h").dtype == np.float16
    np.testing.assert_array_equal(source.read("h"), half)
    np.testing.assert_array_equal(source.read("s"), single)


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("scale", [0.0, 65504.0, 6e-8, 0.0123])
def test_quantised_blocks_match_the_reference_and_the_definition(tmp_path, kind, scale):
    block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    raw = np.random.default_rng(7).integers(0, 256, (3, 2 * size), dtype=np.uint8)
    for begin in range(0, 2 * size, size):
        for at in scale_offsets(kind):
            raw[:, begin + at : begin + at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", tensors={"x": (raw, Kind[kind])}))
    found = source.read("x")
    assert found.shape == source.names()["x"].shape == (3, 2 * block)
    assert found.dtype == np.float32
    reference = gguf.dequantize(raw, Kind[kind])
    np.testing.assert_array_equal(found.view(np.uint32), reference.view(np.uint32))
    by_hand = [[*definition(kind, row[:size]), *definition(kind, row[size:])] for row in raw]
    np.testing.assert_allclose(found, by_hand, rtol=1e-5, atol=1e-6 * max(scale, 1e-6) * 64)


def scale_offsets(kind):
    return {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,))


def definition(kind, block):
    """One block, as ggml's C code defines it, in plain Python."""
    b = block.tolist()
    half = lambda at: float(np.frombuffer(bytes(b[at : at + 2]), np.float16)[0])  # noqa: E731
    if kind == "Q8_0":
        return [half(0) * (v - 256 if v > 127 else v) for v in b[2:]]
    if kind == "Q4_0":
        return [half(0) * ((v & 15) - 8) for v in b[2:]] + [half(0) * ((v >> 4) - 8) for v in b[2:]]
    if kind == "Q4_1":
        low, high = [v & 15 for v in b[4:]], [v >> 4 for v in b[4:]]
        return [half(0) * v + half(2) for v in low + high]
    if kind == "Q6_K":
        ql, qh, d = b[:128], b[128:192], half(208)
        scales = [v - 256 if v > 127 else v for v in b[192:208]]
        out = [0.0] * 256
        for n in range(2):
            for i in range(32):
                low, high = ql[64 * n + i], ql[64 * n + 32 + i]
                bits = qh[32 * n + i]
                for part, nibble in enumerate((low & 15, high & 15, low >> 4, high >> 4)):
                    value = (nibble | ((bits >> (2 * part)) & 3) << 4) - 32
                    out[128 * n + 32 * part + i] = d * scales[8 * n + 2 * part + i // 16] * value
        return out
    packed, quants = b[4:16], b[48:] if kind == "Q5_K" else b[16:]
    fifth = b[16:48] if kind == "Q5_K" else [0] * 32
    out = []
    for j in range(8):
        if j < 4:
            scale, least = packed[j] & 63, packed[j + 4] & 63
        else:
            scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4
            least = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4
        for i in range(32):
            nibble = quants[32 * (j // 2) + i] >> (4 * (j % 2)) & 15
            value = nibble + 16 * (fifth[i] >> j & 1)
            out.append(half(0) * scale * value - half(2) * least)
    return out


@pytest.mark.parametrize("kind", ["Q2_K", "Q5_0", "IQ4_XS", "I8"])
def test_an_unclaimed_type_is_refused_by_name_on_opening(tmp_path, kind):
    block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    data = np.zeros((2, size * (256 // block)), np.uint8)
    path = write_gguf(tmp_path / "m.gguf", tensors={"odd": (data, Kind[kind])})
    with pytest.raises(ValueError, match=rf"m\.gguf.*'odd'.*{kind}.*supported.*Q4_K"):
        GGUFSource(path)


def test_a_type_that_does_not_exist_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tensors={"x": np.zeros((2, 32), np.float32)})
    data = path.read_bytes()
    at = data.index(b"x" + struct.pack("<I", 2)) + 1 + 4 + 16
    path.write_bytes(data[:at] + struct.pack("<I", 250) + data[at + 4 :])
    with pytest.raises(ValueError, match="'x' is stored as type 250"):
        GGUFSource(path)


@pytest.fixture
def model(tmp_path):
    return write_gguf(tmp_path / "model.gguf", tensors=gguf_tensors(hf_tensors()))


def test_a_file_cut_anywhere_is_an_error_that_names_it(model, tmp_path):
    data = model.read_bytes()
    table = data.index(b"token_embd.weight")
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 10, *range(24, table + 1500, 37), len(data) - 20_000, len(data) - 100, len(data) - 1]:
        cut.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            GGUFSource(cut)


@pytest.mark.parametrize(
    ("before_end", "named"),
    [(100, r"tensor 'blk\.1\.ffn_down\.weight'"), (None, r"tensor 'token_embd\.weight'")],
)
def test_a_cut_names_the_tensor(model, before_end, named):
    data = model.read_bytes()
    table = data.index(b"token_embd.weight") + len("token_embd.weight") + 6
    model.write_bytes(data[:-before_end] if before_end else data[:table])
    with pytest.raises(ValueError, match=named):
        GGUFSource(model)


def test_a_cut_names_the_key(model):
    data = model.read_bytes()
    model.write_bytes(data[: data.index(b"tokenizer.ggml.tokens") + 100])
    with pytest.raises(ValueError, match=r"model\.gguf.*key 'tokenizer\.ggml\.tokens'"):
        GGUFSource(model)


@pytest.mark.parametrize("victim", ["tensors", "keys", "string", "strings", "numbers", "dimension", "offset"])
def test_absurd_lengths_allocate_nothing(model, victim):
    data = bytearray(model.read_bytes())

    def after(name: bytes, distance: int) -> int:
        return data.index(name) + len(name) + distance

    at = {
        "tensors": 8,
        "keys": 16,
        "string": after(b"general.architecture", 4),
        "strings": after(b"tokenizer.ggml.tokens", 8),
        "numbers": after(b"tokenizer.ggml.token_type", 8),
        "dimension": after(b"token_embd.weight", 4),
        "offset": after(b"token_embd.weight", 4 + 16 + 4),
    }[victim]
    data[at : at + 8] = struct.pack("<Q", 2**61 + 32)
    model.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"model\.gguf"):
            GGUFSource(model)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("at", "new", "message"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "big-endian"),
    ],
)
def test_other_formats_are_refused(model, at, new, message):
    data = bytearray(model.read_bytes())
    data[at : at + 4] = new
    model.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        GGUFSource(model)


def test_a_file_that_shrinks_while_open_is_an_error(model):
    source = GGUFSource(model)
    model.write_bytes(model.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="cut short while it was open"):
        source.read("blk.1.ffn_down.weight")


def test_an_unknown_tensor_and_a_missing_file_are_named(model, tmp_path):
    with pytest.raises(ValueError, match=r"no tensor 'nothing'.*token_embd"):
        GGUFSource(model).read("nothing")
    with pytest.raises(ValueError, match=r"none\.gguf cannot be read"):
        GGUFSource(tmp_path / "none.gguf")
