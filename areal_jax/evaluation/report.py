"""Outputs of an evaluation: results.json, problems.csv, report.html and a picture.

results.json contains no times and no paths, so that the same answers give the same file, byte for
byte.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from areal_jax.evaluation.answers import Answer
from areal_jax.evaluation.results import Estimate, ProblemResult, Results
from areal_jax.metrics import description
from areal_jax.metrics.files import write_atomically
from areal_jax.records import Task
from areal_jax.reports.page import render_page

RESULTS, PROBLEMS, TIMES, REPORT, PICTURE = (
    "results.json",
    "problems.csv",
    "times.jsonl",
    "report.html",
    "results.png",
)
SHOWN_PER_GRADE = 3
MAX_SHOWN_CHARS = 20_000


def write_report(
    folder: Path,
    headline: str,
    settings: Mapping[str, Any],
    results: Results,
    tasks: Sequence[Task],
    answers: Mapping[int, Sequence[Answer]],
) -> Path:
    """Write all outputs of an evaluation into its folder; return the page's path.

    Args:
        folder: the folder.
        headline: policy and tasks.
        settings: all settings that determine the answers.
        results: the results.
        tasks: the tasks, some of which are shown.
        answers: answers by index of their task.
    """
    write_atomically(
        folder / RESULTS,
        json.dumps({"settings": settings, **asdict(results)}, indent=2, allow_nan=False) + "\n",
    )
    write_atomically(folder / PROBLEMS, _as_csv(results.problems))
    # Imported here, since matplotlib takes a fifth of the time in which a run is imported.
    from areal_jax.evaluation.picture import plot

    write_atomically(folder / PICTURE, plot(results))
    times, page = folder / TIMES, folder / REPORT
    text = render_page(
        Path(__file__).with_name("evaluation.html.jinja"),
        (Path(__file__).with_name("evaluation.js").read_text(encoding="utf-8"),),
        json.dumps(chart_data(results)),
        headline=headline,
        summary=list(summary(results)),
        results=results,
        stop_reasons=_stop_reasons(answers),
        samples=list(shown(tasks, answers)),
        times=[json.loads(line) for line in times.read_text().splitlines()]
        if times.exists()
        else [],
        run=json.loads((folder / description.FILE).read_text()),
        settings=settings,
    )
    write_atomically(page, text)
    return page


def chart_data(results: Results) -> dict[str, Any]:
    """Return what the charts of the page show."""

    scores = [("pass@k", results.pass_at), ("maj@k", results.majority_at)]
    shares = (
        problem.num_correct / problem.num_samples
        for problem in results.problems
        if problem.num_samples
    )
    return {
        "scores": [
            (label, [(k, each.value, *each.interval_95) for k, each in found.items()])
            for label, found in scores
            if found
        ],
        "lengths": {"edges": results.tokens.edges, "counts": results.tokens.counts},
        "shares": [] if results.mean_reward is not None else sorted(shares, reverse=True),
    }


def summary(results: Results) -> Iterator[tuple[str, str]]:
    """Yield the main results as labels and texts."""
    most = max(results.pass_at, default=0)
    if results.mean_reward is not None:
        error = results.mean_reward_standard_error
        yield "mean reward (standard error)", f"{results.mean_reward:.4g} ({error:.2g})"
    else:
        yield "pass@1 (95 %)", format_estimate(results.pass_at[1])
    if most > 1:
        yield f"pass@{most} (95 %)", format_estimate(results.pass_at[most])
        if results.majority_at is not None:
            yield f"maj@{most} (95 %)", format_estimate(results.majority_at[most])
    yield "problems x samples", f"{results.num_tasks:,} x {results.samples_per_task:,}"
    yield "tokens of an answer", f"{results.tokens.mean:,.0f}"
    yield "truncated", f"{results.truncated:.1%}"
    if results.failed:
        yield f"problems that failed, {results.treatment}", f"{sum(results.failed.values()):,}"


def format_estimate(estimate: Estimate) -> str:
    """Format an estimate with its interval."""
    low, high = estimate.interval_95
    return f"{estimate.value:.1%} ({low:.1%} to {high:.1%})"


def shown(
    tasks: Sequence[Task], answers: Mapping[int, Sequence[Answer]]
) -> Iterator[dict[str, Any]]:
    """Yield the first answers of each grade, of different problems."""
    left = dict[str, int]()
    for place in sorted(answers):
        for answer in {answer.grade: answer for answer in reversed(answers[place])}.values():
            if left.setdefault(answer.grade, SHOWN_PER_GRADE):
                left[answer.grade] -= 1
                # The prompt of a seed is the environment's.
                task = tasks[place]
                question = task.prompt[-1].content if task.prompt else task.id
                question = question[:MAX_SHOWN_CHARS]
                yield {
                    "task": tasks[place],
                    "question": question,
                    "answer": answer,
                    "text": answer.text[:MAX_SHOWN_CHARS],
                }


def _stop_reasons(answers: Mapping[int, Sequence[Answer]]) -> dict[str, int]:
    counts = dict[str, int]()
    for of_task in answers.values():
        for answer in of_task:
            counts[answer.stop_reason] = counts.get(answer.stop_reason, 0) + 1
    return counts


def _as_csv(problems: Sequence[ProblemResult]) -> str:
    text = io.StringIO()
    rows = csv.DictWriter(
        text, [field.name for field in fields(ProblemResult)], lineterminator="\n"
    )
    rows.writeheader()
    rows.writerows(asdict(problem) for problem in problems)
    return text.getvalue()
