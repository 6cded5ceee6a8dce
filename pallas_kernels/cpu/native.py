"""Operations of an XLA program on a CPU whose code numba compiled, in this process or in an earlier one.

numba takes seconds to compile a kernel. What it made is kept as an object file beside the programs of JAX's own
compilation cache, where JAX has one (`jax_compilation_cache_dir`, `jax_enable_compilation_cache`), and loaded from
there without numba. numba's own cache is not used: it keeps a function by the date of one of its source files, and
reading it takes most of numba (1 s of a CPU, where loading an object file takes 0.1).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import llvmlite.binding as llvm

logger = logging.getLogger("pallas_kernels")

#: Folder of JAX's compilation cache in which object files are kept.
FOLDER = "pallas_kernels"
#: Bytes of the checksum with which an object file begins.
_CHECKSUM = hashlib.sha256().digest_size


def register(name: str, compiled: Callable[[], bytes], sources: Sequence[Path]) -> object:
    """Makes an operation for `jax.ffi.ffi_call(name, ...)`.

    Args:
        name: of the operation; to be registered once in a process. Also the name of the C function that XLA calls.
        compiled: makes the object file, see `pallas_kernels.cpu.ffi.object_file`. Only called where none is kept.
        sources: the files that decide what `compiled` makes.

    Returns:
        The code that XLA has the address of, to be kept as long as the process lives.
    """
    path = _kept_at(name, sources)
    code = None if path is None else _read(path)
    if code is None:
        code = compiled()
        if path is not None:
            _keep(path, code)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    jax.ffi.register_ffi_target(name, capsule(engine.get_function_address(name), None, None), platform="cpu")
    return engine


def machine() -> tuple[str, ...]:
    """All that decides which machine code runs here: system, processor, and its features."""
    return llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def target_machine() -> llvm.TargetMachine:
    """Makes code for this processor, to be loaded into this process."""
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, reloc="default",
        codemodel="jitdefault", jit=True,
    )  # fmt: skip


def _kept_at(name: str, sources: Sequence[Path]) -> Path | None:
    """Where the object file of an operation is kept, by all that decides what is in it; None: nowhere."""
    cache = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if not jax.config.jax_enable_compilation_cache or not cache or "://" in cache:  # type: ignore[attr-defined]
        return None
    made_by = [f"{package} {importlib.metadata.version(package)}" for package in ("numba", "llvmlite")]
    digest = hashlib.sha256("\n".join([*made_by, str(sys.implementation.cache_tag), *machine()]).encode())
    for source in sources:
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return Path(cache, FOLDER, f"{name}-{digest.hexdigest()[:32]}.o")


def _read(path: Path) -> bytes | None:
    """The object file that is kept at `path`; None where there is none, or one that is not whole."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    code = stored[_CHECKSUM:]
    return code if hashlib.sha256(code).digest() == stored[:_CHECKSUM] else None


def _keep(path: Path, code: bytes) -> None:
    """Puts an object file at `path`, whole or not at all. A cache that cannot be written only costs time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(partial, path)
    except OSError as error:
        logger.warning("The code of a kernel cannot be kept in %s (%s): it is compiled again next time", path, error)
