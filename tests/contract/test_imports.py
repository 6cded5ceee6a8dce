"""Imports go down only, read from the syntax tree: what a module imports anywhere, also inside a function."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: The layers of jpaged, top first. A module may import those in later lines, and its own package. The longest name
#: that a module begins with says where it belongs.
LAYERS = [
    {"jpaged", "jpaged.cli", "jpaged.demo"},  # the doors; `jpaged` itself only names things
    {"jpaged.bench", "jpaged.serve"},
    {"jpaged.llm", "jpaged.baseline"},
    {"jpaged.inputs", "jpaged.options", "jpaged.saved_llm"},
    {"jpaged.viz", "jpaged.record.replay", "jpaged.runtime.outputs", "jpaged.runtime.streams", "jpaged.simulate"},
    {"jpaged.runtime"},
    {"jpaged.record"},
    {"jpaged.text", "jpaged.runtime.sizing", "jpaged.runtime.host_pool", "jpaged.runtime.programs"},
    {"jpaged.step"},
    {"jpaged.models"},
    {"jpaged.quant", "jpaged.parallel"},
    {"jpaged.record.stats"},
    {"jpaged.pool", "jpaged.config", "jpaged.request", "jpaged.startup"},
    {"jpaged.policy", "jpaged.checks"},
]
#: `step` and `models` are siblings: neither knows the other.
SIBLINGS = [{"jpaged.step", "jpaged.models"}]


def modules(package: str) -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str, path: Path) -> set[str]:
    """Full names that a module imports; `from a import b` is `a.b` where that is a module of ours, else `a`."""
    ours = modules("jpaged") | modules("pallas_kernels") | modules("checkpoints")
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            found |= {full if (full := f"{node.module}.{a.name}") in ours else str(node.module) for a in node.names}
    return found


def part(module: str) -> str:
    """The longest name in LAYERS that `module` is, or is inside of."""
    names = module.split(".")
    for length in range(len(names), 1 if len(names) > 1 else 0, -1):
        if any((name := ".".join(names[:length])) in layer for layer in LAYERS):
            return name
    raise AssertionError(f"{module} has no place in LAYERS: give it one")


def rank(name: str) -> int:
    return next(index for index, layer in enumerate(LAYERS) if name in layer)


JPAGED = modules("jpaged")


@pytest.mark.parametrize("module", JPAGED)
def test_jpaged_imports_downwards(module):
    """Catches: the step that knows the engine, a model that knows the step, a cycle in the making."""
    mine = part(module)
    for other in imports(module, JPAGED[module]):
        if other.split(".")[0] != "jpaged" or part(other) == mine:
            continue
        theirs = part(other)
        assert rank(theirs) >= rank(mine), f"{module} imports {other}, which stands above it"
        assert not any({mine, theirs} == pair for pair in SIBLINGS), f"{module} imports {other}: they meet in pool.py"
        assert theirs != "jpaged", f"{module} imports the front door"


def test_there_is_no_cycle_within_a_layer():
    """Catches: two parts of one layer that import each other."""
    edges = set()
    for module, path in JPAGED.items():
        edges |= {(part(module), part(other)) for other in imports(module, path) if other.startswith("jpaged.")}
    edges = {(a, b) for a, b in edges if a != b}
    while edges:
        leaves = {b for _, b in edges} - {a for a, _ in edges}
        assert leaves, f"a cycle: {sorted(edges)}"
        edges = {(a, b) for a, b in edges if b not in leaves}


@pytest.mark.parametrize("package", ["jpaged", "pallas_kernels", "checkpoints"])
def test_nobody_imports_torch(package):
    """Catches: a converter that pulls in gigabytes, and a second framework on the GPU."""
    for module, path in modules(package).items():
        roots = {name.split(".")[0] for name in imports(module, path)}
        assert not roots & {"torch", "transformers", "tensorflow", "vllm"}, module


def test_pallas_kernels_import_jax_only():
    """Catches: kernels that cannot be used without the engine, or for a GPU without what a CPU needs."""
    allowed = {"jax", "pallas_kernels"} | set(sys.stdlib_module_names)
    for module, path in modules("pallas_kernels").items():
        roots = {name.split(".")[0] for name in imports(module, path)}
        for_cpu = module.startswith("pallas_kernels.cpu.") or module.endswith((".numba_cpu", ".numba_call"))
        extra = {"numba", "llvmlite", "numpy"} if for_cpu else set()
        extra |= {"numpy"} if module.endswith(".cases") else set()  # what jax brings; operands for tests are made in it
        extra |= {"jaxlib"} if module.endswith(".ampere") else set()  # the other half of jax: its compiler's dialects
        assert roots <= allowed | extra, f"{module}: {sorted(roots)}"


def test_numba_is_imported_where_a_cpu_computes_attention_and_no_sooner():
    """Catches: most of a second more for every import, and on machines that never use it."""
    program = "import sys, jpaged, pallas_kernels; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_checkpoints_never_import_the_engine():
    """Catches: byte movers that give bytes a meaning."""
    for module, path in modules("checkpoints").items():
        roots = {name.split(".")[0] for name in imports(module, path)}
        assert not roots & {"jpaged", "pallas_kernels"}, module


def test_a_decoder_is_an_argument_of_the_step():
    """Catches: a step that can only run real models. Everything that it shares with them is in pool.py."""
    shared = {"jpaged.pool", "jpaged.policy", "jpaged.config", "jpaged.request", "jpaged.step"}
    for module, path in JPAGED.items():
        if part(module) == "jpaged.step":
            ours = {part(name) for name in imports(module, path) if name.split(".")[0] == "jpaged"}
            assert ours <= shared, f"{module}: {sorted(ours - shared)}"
            assert not any(name.startswith("pallas_kernels") for name in imports(module, path)), module
