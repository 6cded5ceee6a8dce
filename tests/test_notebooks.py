"""The notebooks: stored without outputs, and they run from top to bottom on the real small model."""

import os
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """JAX keeps what it has compiled here, so that what two notebooks share is compiled once."""
    return tmp_path_factory.mktemp("compiled")


def test_they_are_there():
    names = {path.stem for path in NOTEBOOKS}
    assert names >= {
        "01_quickstart", "02_pages_by_hand", "03_watch_the_step", "04_static_vs_continuous",
        "05_prefix_sharing_and_forking", "06_write_a_policy",
    }  # fmt: skip


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, compiled, tmp_path, monkeypatch):
    from nbclient import NotebookClient

    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "True")  # half of the time is compiling
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs
    assert [output for output in outputs if output.output_type == "error"] == []
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    draws = any(name in cell.source for name in ("draw_pages(", "plot_") for cell in notebook.cells)
    assert bool(pictures) == draws
    noise = [output.text for output in outputs if output.get("name") == "stderr" and "Warning" in output.text]
    assert noise == []
