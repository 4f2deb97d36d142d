"""The notebook of the documentation, executed in a kernel."""

from __future__ import annotations

from pathlib import Path

import nbformat  # pyright: ignore[reportMissingImports] # of the extra `docs`
import pytest
from nbclient import NotebookClient  # pyright: ignore[reportMissingImports]

NOTEBOOK = Path(__file__).parents[2] / "docs" / "first_run.ipynb"


def outputs(notebook: nbformat.NotebookNode) -> list[set[str]]:
    """The types of the outputs of each cell of code."""
    return [
        {kind for output in cell.outputs for kind in output.get("data", ())}
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_notebook_trains_and_plots_in_a_kernel(
    tmp_path: Path, of_a_command: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in of_a_command.items():
        monkeypatch.setenv(name, value)
    stored = nbformat.read(NOTEBOOK, as_version=4)
    fresh = nbformat.read(NOTEBOOK, as_version=4)
    # Batches a fourth as large: the stored plot shows how the reward rises, a test need not see it.
    first = next(cell for cell in fresh.cells if cell.cell_type == "code")
    few, smaller = '"num_steps=12"', '"num_steps=12", "rollout.groups_per_batch=4"'
    assert few in first.source
    first.source = first.source.replace(few, smaller)
    NotebookClient(fresh, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "image/png" in outputs(fresh)[3]
    assert outputs(fresh) == outputs(stored)
    results = [cell for cell in fresh.cells if cell.cell_type == "code"][2].outputs
    assert "('completed', 12)" in [output.get("data", {}).get("text/plain") for output in results]
    assert NOTEBOOK.stat().st_size < 100_000
