"""Hooks of MkDocs: pages generated from the code, and links to files outside of the site."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chz
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import areal_jax
from areal_jax.cli import evaluate, plan, report, serve, tinker, train
from areal_jax.config.experiment import Experiment
from areal_jax.config.overrides import groups, kind_name, reachable, settings
from areal_jax.metrics.config import HealthConfig
from areal_jax.metrics.health import CHECKS
from areal_jax.metrics.table import TABLE

DOCS = Path(__file__).parent
ROOT = DOCS.parent
FIGURES = ROOT / "benchmarks" / "results"
SOURCE = "https://github.com/areal-jax/areal_jax/blob/main/"
COMMANDS = {
    "train": train,
    "evaluate": evaluate,
    "serve": serve,
    "plan": plan,
    "report": report,
    "tinker": tinker,
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, the notebook as a page, the pages of the root, and the figures."""
    pages = {
        "reference/settings.md": settings_page(),
        "reference/cli.md": cli_page(),
        "reference/api.md": api_page(),
        "reference/metrics.md": metrics_page(),
        "first_run.md": notebook_page(DOCS / "first_run.ipynb"),
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text(),
        "architecture.md": (ROOT / "BUILD.md").read_text(),
        "changes.md": (ROOT / "CHANGELOG.md").read_text(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for figure in FIGURES.glob("*.png"):
        files.append(File.generated(config, f"figures/{figure.name}", abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave `docs/` at the site's figures, or at the repository."""
    folder = (DOCS / page.file.src_uri).parent
    moved = {"CONTRIBUTING.md": "contributing.md", "BUILD.md": "architecture.md"}

    def resolve(found: re.Match[str]) -> str:
        target, *_ = found[1].split("#")
        if ":" in target or not target:
            return found[0]
        if target.endswith(".ipynb"):
            return f"]({target.removesuffix('.ipynb')}.md)"
        inside = (folder / target).resolve()
        if inside.is_relative_to(DOCS) and files.get_file_from_path(
            inside.relative_to(DOCS).as_posix()
        ):
            return found[0]
        up = "../" * page.file.src_uri.count("/")
        if target in moved:
            return f"]({up}{moved[target]})"
        at = inside if inside.is_relative_to(ROOT) and inside.exists() else ROOT / target
        if not at.resolve().exists():
            return found[0]
        if at.parent == FIGURES:
            return f"]({up}figures/{at.name})"
        return f"]({SOURCE}{at.resolve().relative_to(ROOT).as_posix()})"

    return re.sub(r"\]\(([^)\s]+)\)", resolve, markdown)


def settings_page() -> str:
    """Every setting of a training run, by group, as `--help=all` lists them."""
    listed, headings = settings(Experiment), groups(Experiment)
    by_group: dict[str, list[str]] = {}
    for setting, choices in reachable(listed):
        group = setting.key.rpartition(".")[0]
        needs = ", ".join(f"`{choice}`" for choice in choices.split())
        kind = kind_name(setting.kind)
        cells = (f"`{setting.key}`", f"`{setting.text()}`", kind, setting.doc, needs)
        by_group.setdefault(group, []).append(_row(cells))
    lines = [
        "# Settings",
        "Settings of `areal-train` for reinforcement learning, with their defaults.",
        "An experiment sets its own values: `areal-train --exp=NAME --help=all` shows them.",
    ]
    for group, rows in by_group.items():
        lines += ["", f"## {group or 'Run'}", headings.get(group, ""), ""]
        lines.append(_row(("setting", "default", "type", "meaning", "with")))
        lines += ["|---|---|---|---|---|", *rows]
    return "\n".join(lines)


def cli_page() -> str:
    """The usage of every command."""
    lines = ["# Commands"]
    for name, module in COMMANDS.items():
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            assert module.main(["--help"]) == 0
        lines += ["", f"## areal-{name}", "", "```text", shown.getvalue().rstrip(), "```"]
    return "\n".join(lines)


def api_page() -> str:
    """Directives of mkdocstrings for every public name."""
    modules = {**areal_jax._FUNCTIONS, "serve": "areal_jax.api.server"}
    modules |= {"evaluate": "areal_jax.api.evaluating", "train": "areal_jax.api.training"}
    modules |= areal_jax._MODULE_OF
    lines = ["# Python API", "", "Every name is an attribute of `areal_jax`.", ""]
    for name in sorted(areal_jax.__all__, key=str.lower):
        lines += [f"::: {modules[name]}.{name}", ""]
    return "\n".join(lines)


def metrics_page() -> str:
    """The health checks and the metrics, with units and healthy ranges."""
    thresholds = chz.asdict(HealthConfig())
    checks = [
        _row(
            (
                f"`health/{check.name}`",
                check.meaning,
                check.healthy.format(**thresholds),
                check.remedy,
            )
        )
        for check in CHECKS
    ]
    metrics = [
        _row((f"`{entry.name}`", entry.meaning, entry.unit, entry.healthy)) for entry in TABLE
    ]
    return "\n".join(
        (
            "# Metrics",
            "",
            "Metrics of `metrics.jsonl`. `*` is one segment that depends on the run.",
            "",
            "## Health checks",
            "",
            "`health/NAME` is 1 if the check fails in all of the last `health.window_steps` steps.",
            "",
            _row(("check", "finds", "healthy", "change")),
            "|---|---|---|---|",
            *checks,
            "",
            "## All metrics",
            "",
            _row(("metric", "meaning", "unit", "healthy")),
            "|---|---|---|---|",
            *metrics,
        )
    )


def notebook_page(path: Path) -> str:
    """A notebook with its stored outputs, as Markdown."""
    return "\n\n".join(
        part for cell in json.loads(path.read_text())["cells"] for part in _cell(cell)
    )


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            image = "".join(data["image/png"]).replace("\n", "")
            yield f"![chart](data:image/png;base64,{image})"
        elif text := output.get("text", data.get("text/plain")):
            yield f"```text\n{''.join(text).rstrip()}\n```"


def _row(cells: tuple[str, ...]) -> str:
    """A row of a table. A pipe or a newline would end a cell."""
    escaped = (re.sub(r"\s+", " ", cell).replace("|", "\\|") for cell in cells)
    return "| " + " | ".join(escaped) + " |"
