"""Outputs of an evaluation."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

from areal_jax.evaluation.answers import Answer
from areal_jax.evaluation.report import SHOWN_PER_GRADE, shown, summary, write_report
from areal_jax.evaluation.results import Results, compute_results
from areal_jax.metrics.description import write_description
from areal_jax.records import Message, ResultKind, Task


def task(place: int) -> Task:
    return Task(f"t{place}", (Message("user", f"question {place}"),), "7", family="f")


def answer(grade: ResultKind, text: str = "a <b> & c") -> Answer:
    return Answer(
        grade, "length" if grade == "wrong" else "stop", 4, "7" if grade == "correct" else "8", text
    )


TASKS = [task(place) for place in range(6)]
# One right and one wrong answer each, but for the last, which has two wrong ones.
ANSWERS = {
    place: (answer("correct", f"right {place}"), answer("wrong", f"wrong {place}"))
    for place in range(5)
}
ANSWERS[5] = (answer("wrong", "wrong 5"), answer("wrong", "wrong again"))


def results() -> Results:
    return compute_results([*TASKS, task(6)], ANSWERS, {6: TimeoutError("late, <very>")})


def test_summary_shows_all_samples_and_the_largest_k() -> None:
    # Of 7 problems 5 have one right answer of two, whose vote wins half of the time; one has no
    # answer.
    found = dict(summary(results()))
    assert found["pass@1 (95 %)"].startswith("35.7% (")
    assert found["pass@2 (95 %)"].startswith("71.4% (")
    assert found["maj@2 (95 %)"].startswith("35.7% (")
    assert found["problems x samples"] == "7 x 2"
    assert (found["tokens of an answer"], found["truncated"]) == ("4", "58.3%")
    assert found["problems that failed, counted as wrong"] == "1"


def test_shown_answers_cover_each_grade_and_different_problems() -> None:
    of = list(shown(TASKS, ANSWERS))
    for grade in ("correct", "wrong"):
        found = [each for each in of if each["answer"].grade == grade]
        assert [each["task"].id for each in found] == [
            f"t{place}" for place in range(SHOWN_PER_GRADE)
        ]
    # Of a problem with two of a kind, the first.
    assert [each["text"] for each in shown(TASKS[5:], {0: ANSWERS[5]})] == ["wrong 5"]


def test_every_output_lists_every_problem_and_escapes_text(tmp_path: Path) -> None:
    write_description(tmp_path, "headline", {}, "1 cpu")
    found = results()
    page = write_report(
        tmp_path,
        "headline",
        {"seed": 1},
        found,
        TASKS,
        ANSWERS | {0: (answer("correct"), answer("wrong"))},
    )
    written = json.loads((tmp_path / "results.json").read_text())
    assert (
        written["settings"] == {"seed": 1}
        and written["pass_at"]["2"]["value"] == found.pass_at[2].value
    )
    rows = list(csv.DictReader((tmp_path / "problems.csv").read_text().splitlines()))
    assert (
        [row["task"] for row in rows]
        == [problem["task"] for problem in written["problems"]]
        == [f"t{i}" for i in range(7)]
    )
    assert [row["num_correct"] for row in rows] == ["1"] * 5 + ["0", "0"]
    assert rows[6]["failed"] == "TimeoutError: late, <very>"
    text = page.read_text()
    assert "a &lt;b&gt; &amp; c" in text and "<very>" not in text


def test_raw_rewards_are_reported_with_their_standard_error(tmp_path: Path) -> None:
    # Means of the problems: 1 and 4. One of three failed.
    answers = {
        0: tuple(Answer("scored", "stop", 4, None, "a", reward) for reward in (0.5, 1.5)),
        1: tuple(Answer("scored", "stop", 4, None, "b", reward) for reward in (-2.0, 10.0)),
    }
    tasks = [replace(task(place), family=f"f{place % 2}") for place in range(3)]
    found = compute_results(tasks, answers, {2: TimeoutError("late")}, is_raw=True)
    assert (found.mean_reward, found.mean_reward_standard_error) == (2.5, 1.5)
    assert {name: family.mean_reward for name, family in found.families.items()} == {
        "f0": 1.0,
        "f1": 4.0,
    }
    figures = dict(summary(found))
    assert figures["mean reward (standard error)"] == "2.5 (1.5)"
    assert figures["problems that failed, left out of the mean"] == "1"
    assert not any("@" in name for name in figures)
    write_description(tmp_path, "headline", {}, "1 cpu")
    text = write_report(tmp_path, "headline", {}, found, tasks, answers).read_text()
    assert "mean reward" in text
    assert "pass@" not in text
    assert json.loads((tmp_path / "results.json").read_text())["mean_reward"] == 2.5
