"""Orbax directories: what was saved comes back, on the devices at hand, wherever it was saved."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from checkpoints import open_source, orbax

ARRAYS = {
    "embed": np.arange(12, dtype=np.float32).reshape(3, 4),
    "layers.0.o": (np.arange(8, dtype=np.uint16) * 4001).reshape(2, 4).view(ml_dtypes.bfloat16),
    "layers.10.o": np.full((2, 4), 0.5, np.float16),
}


def assert_same(found):
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(found[name]).view(np.uint8), array.view(np.uint8))


def test_arrays_metadata_and_files_come_back(tmp_path):
    metadata = {"config": {"layers": 2, "ids": [1, 2], "none": None}}
    path = orbax.save(tmp_path / "deep/saved", ARRAYS, metadata, {"tokenizer.json": '{"é": "🌟"}'})
    assert path == tmp_path / "deep/saved"
    assert_same(orbax.restore(path))
    source = open_source(path)
    assert isinstance(source, orbax.OrbaxSource)
    assert source.metadata == metadata
    assert (source.files / "tokenizer.json").read_text(encoding="utf-8") == '{"é": "🌟"}'
    assert source.names()["layers.0.o"].shape == (2, 4)
    assert source.names()["layers.0.o"].kind == "bfloat16"
    assert_same({name: source.read(name) for name in source.names()})


def test_arrays_without_elements_come_back(tmp_path):
    """Catches: Orbax, which refuses them; alone, among others, and where a sharding is asked for."""
    empty = {"none": np.zeros((2, 0, 3), ml_dtypes.bfloat16)}
    for arrays in (ARRAYS | empty, empty):
        path = orbax.save(tmp_path / str(len(arrays)), arrays)
        for found in (orbax.restore(path), orbax.restore(path, on_one_cpu())):
            assert found.keys() == arrays.keys()
            assert (found["none"].shape, found["none"].dtype) == ((2, 0, 3), ml_dtypes.bfloat16)
        assert open_source(path).read("none").shape == (2, 0, 3)


def test_relative_paths_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    orbax.save("here", ARRAYS)
    assert_same(orbax.restore("here"))
    assert_same(orbax.restore(Path("./here")))


def test_a_moved_directory_still_opens(tmp_path):
    orbax.save(tmp_path / "a", ARRAYS).rename(tmp_path / "b")
    assert_same(orbax.restore(tmp_path / "b"))


def test_restores_onto_a_given_sharding(tmp_path):
    orbax.save(tmp_path / "a", ARRAYS)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for wanted in (sharding, dict.fromkeys(ARRAYS, sharding)):
        found = orbax.restore(tmp_path / "a", wanted)
        assert_same(found)
        assert all(isinstance(a, jax.Array) and a.sharding == sharding for a in found.values())
    with pytest.raises(ValueError, match=r"differ in \['layers.0.o', 'layers.10.o'\]"):
        orbax.restore(tmp_path / "a", {"embed": sharding})


TWO_DEVICES = """
import sys, jax, numpy as np
from checkpoints import orbax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("x",))
assert mesh.size == 2
w = jax.device_put(np.arange(32, dtype=np.float32).reshape(4, 8), NamedSharding(mesh, P("x", None)))
b = jax.device_put(np.arange(32).reshape(4, 8).astype(jax.numpy.bfloat16), NamedSharding(mesh, P(None, "x")))
orbax.save(sys.argv[1], {"w": w, "b": b})
"""


def on_one_cpu():
    return jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])


def test_a_checkpoint_of_two_devices_opens_on_one(tmp_path):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    root = Path(orbax.__file__).parent.parent
    subprocess.run(
        [sys.executable, "-c", TWO_DEVICES, str(tmp_path / "saved")],
        env={**os.environ, **flags, "PYTHONPATH": str(root)}, check=True, capture_output=True,
    )  # fmt: skip
    expected = np.arange(32, dtype=np.float32).reshape(4, 8)
    for found in (orbax.restore(tmp_path / "saved"), orbax.restore(tmp_path / "saved", on_one_cpu())):
        np.testing.assert_array_equal(np.asarray(found["w"]), expected)
        assert found["b"].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(np.asarray(found["b"], np.float32), expected)


def test_a_checkpoint_of_a_gpu_opens_without_one(tmp_path):
    device = jax.devices("cpu")[0]
    orbax.save(tmp_path / "saved", {name: jax.device_put(a, device) for name, a in ARRAYS.items()})
    recorded = tmp_path / "saved/arrays/_sharding"
    text = recorded.read_text()
    assert str(device) in text
    recorded.write_text(text.replace(str(device), "cuda:0"))
    assert_same(orbax.restore(tmp_path / "saved"))
    assert_same(orbax.restore(tmp_path / "saved", on_one_cpu()))


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/precious").write_text("x")
    with pytest.raises(ValueError, match="already exists: give a new directory"):
        orbax.save(tmp_path / "full", ARRAYS)
    (tmp_path / "empty").mkdir()
    orbax.save(tmp_path / "empty", ARRAYS)
    assert_same(orbax.restore(tmp_path / "empty"))


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(*_, **__):
        raise OSError("No space left on device")

    with pytest.raises(ValueError, match="plain names"):
        orbax.save(tmp_path / "x", ARRAYS, files={"../x": ""})
    with pytest.raises(TypeError):
        orbax.save(tmp_path / "x", ARRAYS, metadata={"not json": object()})
    monkeypatch.setattr(orbax.os, "replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        orbax.save(tmp_path / "x", ARRAYS)
    assert list(tmp_path.iterdir()) == []


def test_damage_is_an_error_that_names_the_directory(tmp_path):
    # one array: Orbax reads several at once, and abandons the rest noisily when one of them fails
    path = orbax.save(tmp_path / "saved", {"embed": ARRAYS["embed"]})
    description = json.loads((path / "checkpoint.json").read_text())
    description["arrays"]["embed"]["shape"] = [4, 3]
    (path / "checkpoint.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"'embed' of .*saved is float32\(3, 4\)"):
        open_source(path).read("embed")
    for file in (path / "arrays").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"saved/arrays cannot be restored"):
        orbax.restore(path)
    description["version"] = 99
    (path / "checkpoint.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="format and version"):
        open_source(path)
    with pytest.raises(ValueError, match=r"no checkpoint\.json"):
        orbax.restore(tmp_path)


def ghost(arrays):
    arrays["ghost"] = {"shape": [2], "dtype": "float32"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (ghost, r"has no array 'ghost', which checkpoint\.json describes"),
        (lambda arrays: arrays.update(ghost=arrays.pop("embed")), r"has no array 'ghost'"),
        (lambda arrays: arrays["embed"].update(shape=[0, 4]), r"has an array 'embed' that is not empty.*\(0, 4\)"),
        (lambda arrays: arrays["embed"].update(dtype="float16"), r"array 'embed' of .*float32.*says float16"),
        (lambda arrays: arrays["embed"].update(dtype="nope"), r"damaged.*shape and the dtype of array 'embed'"),
        (lambda arrays: arrays["embed"].update(shape=[-3, 4]), r"damaged.*array 'embed'"),
        (lambda arrays: arrays["embed"].update(shape="34"), r"damaged.*array 'embed'"),
        (lambda arrays: arrays["embed"].pop("shape"), r"damaged.*array 'embed'"),
        (lambda arrays: arrays.update(embed=7), r"damaged.*array 'embed', and says 7"),
    ],
)
def test_a_description_of_other_arrays_than_are_stored_names_the_array(tmp_path, change, message):
    """U-24. Catches: Orbax's placeholder taken for an array, and an array made up because it is said to be empty."""
    path = orbax.save(tmp_path / "saved", {"embed": ARRAYS["embed"]})
    description = json.loads((path / "checkpoint.json").read_text())
    change(description["arrays"])
    (path / "checkpoint.json").write_text(json.dumps(description))
    for sharding in (None, on_one_cpu()):
        with pytest.raises(ValueError, match=message):
            orbax.restore(path, sharding)
    for key in ("arrays", "metadata"):
        (path / "checkpoint.json").write_text(json.dumps(description | {key: [1]}))
        with pytest.raises(ValueError, match=rf"damaged: '{key}' must be an object"):
            open_source(path)
