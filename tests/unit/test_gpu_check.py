"""The GPU check, rehearsed where there is no GPU: that it measures what it says, goes on where it stopped, and loses
nothing to a section that fails."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from jpaged.bench import gpu_check
from jpaged.bench.gpu_check import LLAMA_8B, SECTIONS, SMOLLM2_135M, Sizes, run, table


def test_a_second_run_goes_on_where_the_first_stopped(tmp_path, monkeypatch):
    """Catches: a section measured twice, one that took the process down tried again, a failure that ends the rest."""
    calls = []

    def section(name, result=None):
        def measure(found, sizes):
            calls.append(name)
            if result is None:
                raise RuntimeError(f"{name} is broken")
            return result

        return measure

    sections = {
        "ceilings": section("ceilings", {"copy_bytes_per_s": 4e12, "flops_per_s": 7e14}),
        "every_case": section("every_case"),
        "engine_steps": section("engine_steps", {}),
    }
    monkeypatch.setattr(gpu_check, "SECTIONS", sections)
    path, said = tmp_path / "gpu.json", []
    found = run(path, small=True, say=said.append)
    assert calls == list(sections)
    assert "every_case is broken" in found["every_case"]["failed"]
    assert json.loads(path.read_text()) == found
    assert "4,000 GB/s, 700.0 TFLOP/s" in table({k: v for k, v in found.items() if k != "engine_steps"})

    # As if the process had ended within the last section.
    path.write_text(json.dumps(found | {"engine_steps": {"started": "now"}}))
    again = run(path, small=True, say=said.append)
    assert calls == list(sections)
    assert again["engine_steps"] == {"failed": "the process ended in it"}
    assert [line.split() for line in table(again).splitlines()[-2:]] == [
        ["failed", "every_case"],
        ["failed", "engine_steps"],
    ]
    with pytest.raises(ValueError, match="give another --json"):
        run(path, small=False)
    assert run(tmp_path / "none.json", small=True, limit_s=-1, say=said.append).keys() == {"machine"}
    assert "no time left" in said[-1]


def test_the_engine_s_steps_are_measured(tmp_path, monkeypatch):
    """The section that leans most on the engine, with a small model. Catches: a burst that never decodes in all rows,
    a least time that is more than what was taken."""
    real = {name: SECTIONS[name] for name in ("ceilings", "engine_steps")}
    monkeypatch.setattr(gpu_check, "SECTIONS", real)
    found = run(tmp_path / "gpu.json", small=True, say=lambda text: None)
    steps = found["engine_steps"]
    assert "failed" not in steps, steps
    assert steps["decode_over_least"] > 1 and steps["prefill_over_least"] > 1
    assert "x least (aim 1.3)" in table(found)


def test_the_models_are_what_they_are_called():
    assert LLAMA_8B.num_parameters == 8_030_261_248
    assert SMOLLM2_135M.num_parameters == 134_515_008


def test_the_benchmarks_are_those_that_are_aimed_at():
    """Contexts 512 to 32k, batches 1 to 256, as far as the keys of a layer fit."""
    names = Sizes(small=False).benchmarks("decode-")
    assert {"decode-1x512", "decode-1x32768", "decode-64x32768", "decode-256x8192"} <= set(names)


def test_it_needs_nothing_but_jax_flax_and_numpy():
    """Catches: an import at the top of a module on its way that the GPU machine has not."""
    program = (
        "import sys, flax.nnx\n"  # flax brings rich and orbax itself
        "blocked = {'gguf', 'tokenizers', 'safetensors', 'huggingface_hub', 'jinja2', 'tqdm', 'typer', 'matplotlib',"
        " 'platformdirs', 'numba', 'psutil', 'pynvml'}\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in blocked: raise ImportError('blocked ' + name)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import jpaged.bench.gpu_check\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
