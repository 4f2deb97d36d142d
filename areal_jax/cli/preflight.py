"""`areal-train --exp=NAME --preflight`: try an experiment without training it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from areal_jax.api.preflight import preflight as try_experiment
from areal_jax.cli.arguments import fail
from areal_jax.config.experiment import AnyExperiment

if TYPE_CHECKING:
    from areal_jax.run.preflight import PreflightReport


def preflight(experiment: AnyExperiment, source: str | None) -> int:
    """Try an experiment and print what came of it; the exit status, 1 if something is wrong.

    Args:
        experiment: the experiment.
        source: its name or file.

    Raises:
        ConfigError: a part of the experiment is missing, or does not fit the others.
    """
    report = try_experiment(experiment, source)
    _show(report, Console(highlight=False))
    if number := len(report.findings):
        findings = "1 finding" if number == 1 else f"{number} findings"
        return fail(f"preflight of {report.name}: {findings}", 1)
    return 0


def _show(report: PreflightReport, console: Console) -> None:
    for note in report.notes:
        console.print(f"note: {escape(note)}", soft_wrap=True)
    if report.rows:
        console.print(_table_of_scripts(report))
    if report.examples:
        console.print(_table_of_examples(report))
    if (update := report.update) is not None:
        what = f"gradient norm {update.grad_norm:.3g} over {update.num_tokens} tokens"
        console.print(f"one update of a tiny random policy: {what}")
    for finding in report.findings:
        console.print(f"finding: {escape(str(finding))}", soft_wrap=True)
    outcome = "passed" if not report.findings else "failed"
    console.print(f"preflight of {report.name} {outcome} in {report.seconds:.0f} s")


def _table_of_scripts(report: PreflightReport) -> Table:
    table = Table(title=f"preflight of {report.name}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("kind", "script", "grade"):
        table.add_column(name, no_wrap=name != "script")
    for name in ("reward", "advantage"):
        table.add_column(name, justify="right", no_wrap=True)
    has_tools = any(row.tools for row in report.rows)
    if has_tools:
        table.add_column("tools reached", no_wrap=True)
    for row in report.rows:
        cells = (
            row.kind,
            row.script,
            _counts(row.grades),
            _range(row.rewards),
            _range(row.advantages),
            *([_counts(row.tools)] if has_tools else []),
        )
        table.add_row(*map(escape, cells))
    return table


def _table_of_examples(report: PreflightReport) -> Table:
    table = Table("what", title=f"preflight of {report.name}", box=box.SIMPLE_HEAD)
    for name in ("examples", "tokens", "in the loss", "end with a stop token"):
        table.add_column(name, justify="right")
    for row in report.examples:
        share = f"{row.num_loss_tokens} ({row.num_loss_tokens / max(row.num_tokens, 1):.0%})"
        table.add_row(
            row.what, str(row.num_examples), str(row.num_tokens), share, str(row.num_ended)
        )
    return table


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count)


def _range(values: Sequence[float]) -> str:
    """The value, or the lowest and the highest."""
    if not values:
        return ""
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low}..{high}"
