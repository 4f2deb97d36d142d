"""The folder of graded answers, which survives a kill at any byte, and the results of answers."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from letters import Letters

from areal_jax.evaluation.answers import Answer, AnswerFolder, extract_vote, make_answer
from areal_jax.evaluation.results import compute_results
from areal_jax.records import NO_VERSION, Message, Sample, Task

SETTINGS = {
    "seed": 1,
    "evaluation.samples_per_task": 4,
    "policy.lora.targets": ("q_proj", "v_proj"),
}


def task(place: int) -> Task:
    return Task(
        f"rows.jsonl:{place}", (Message("user", "?"),), "7", family="odd" if place % 2 else "even"
    )


def answers(place: int) -> list[Answer]:
    """Four answers, with texts that are hard for a file of lines."""
    kinds = [("correct", "7"), ("wrong", "8"), ("wrong", "8"), ("no_answer", None)]
    return [
        Answer(
            *(kind, "stop" if number else "length", place + number, vote, f"é\n{{}}\ud83d {number}")
        )  # type: ignore[arg-type]
        for number, (kind, vote) in enumerate(kinds[: 4 - place % 2])
    ]


def add_missing(path: Path) -> dict[int, tuple[Answer, ...]]:
    """Add the missing answers of three tasks, the last first; return the folder's answers."""
    with closing(AnswerFolder(path, SETTINGS, 3)) as folder:
        for place in sorted({0, 1, 2} - folder.found.keys(), reverse=True):
            folder.add(place, task(place), answers(place))
        return folder.found


def test_folder_torn_at_any_byte_resumes_with_complete_rows(tmp_path: Path) -> None:
    whole = add_missing(tmp_path / "whole")
    data = (tmp_path / "whole" / "samples.jsonl").read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    near_ends = {end + by for end in (0, *ends) for by in (-2, -1, 0, 1)}
    cut = tmp_path / "cut"
    add_missing(cut)
    for num_bytes in sorted({*range(0, len(data), 97), *near_ends} & set(range(len(data) + 1))):
        (cut / "samples.jsonl").write_bytes(data[:num_bytes])
        with closing(AnswerFolder(cut, SETTINGS, 3)) as folder:
            assert sorted(folder.found) == sorted(
                [2, 1, 0][: sum(end <= num_bytes for end in ends)]
            )
        assert add_missing(cut) == add_missing(cut) == whole
    tasks = [task(place) for place in range(3)]
    assert compute_results(tasks, add_missing(cut), {}) == compute_results(
        tasks, dict(sorted(whole.items())), {}
    )


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    AnswerFolder(tmp_path, SETTINGS, 0).close()
    before = (tmp_path / "settings.json").read_text()
    other = {**SETTINGS, "evaluation.samples_per_task": 8, "policy.path": "DIR"}
    with pytest.raises(
        ValueError,
        match=r"samples_per_task is 4 there and 8 here; policy.path is None there and 'DIR' here",
    ):
        AnswerFolder(tmp_path, other, 0)
    fewer = {name: value for name, value in SETTINGS.items() if name != "seed"}
    with pytest.raises(ValueError, match=r"other settings: seed is 1 there and None here;"):
        AnswerFolder(tmp_path, fewer, 0)
    assert (tmp_path / "settings.json").read_text() == before
    (tmp_path / "settings.json").unlink()
    with pytest.raises(ValueError, match=r"expected settings.json next to samples.jsonl"):
        AnswerFolder(tmp_path, SETTINGS, 0)


def test_vote_is_the_canonical_answer_of_the_last_turn() -> None:
    def answer_from(*pieces: tuple[str, bool]) -> Answer:
        """Make an answer of pieces of text, each sampled by the policy or not."""
        tokens = Letters().encode("".join(text for text, _ in pieces))
        mask = np.array([sampled for text, sampled in pieces for _ in text], np.bool_)
        versions = np.where(mask, 0, NO_VERSION).astype(np.int32)
        sample = Sample(
            tokens, mask, np.zeros(len(tokens), np.float32), versions, 0.0, "wrong", "stop"
        )
        return make_answer(sample, Letters(), accept_plain=False)

    turns = answer_from(
        ("Q?", False), ("\\boxed{1}", True), (" no \\boxed{9} ", False), ("\\boxed{042}", True)
    )
    assert (turns.vote, turns.num_tokens) == ("42", 9 + 11)
    assert turns.text == "\\boxed{1} no \\boxed{9} \\boxed{042}"
    # A last turn without an answer does not fall back to an earlier one.
    assert (
        answer_from(
            ("Q?", False), ("\\boxed{1}", True), (" no ", False), ("then I give up", True)
        ).vote
        is None
    )
    assert answer_from(("Q?", False)).text == ""
    assert extract_vote("no answer", accept_plain=False) is None
    assert {
        extract_vote(f"\\boxed{{{text}}}", False) for text in ("1,234", "$1234$", "1234.0", "01234")
    } == {"1234"}
    assert extract_vote("\\boxed{\\frac{1}{2} }", False) == extract_vote(
        "\\boxed{\\frac{1}{2}.}", False
    )
    assert (
        extract_vote("\\boxed{\\text{Monday}}", False)
        == extract_vote("\\boxed{monday}", False)
        == "monday"
    )
    assert extract_vote("\\boxed{(1,2)}", False) != extract_vote("\\boxed{(2,1)}", False)


def test_results_equal_hand_computed_numbers() -> None:
    # Task 0: one right of four, two for 8, one silent. Task 1: one right of three, two for 8. Task
    # 2 failed.
    found = {place: answers(place) for place in range(2)}
    tasks, failures = [task(place) for place in range(3)], {2: TimeoutError("late")}
    results = compute_results(tasks, found, failures)
    assert compute_results(tasks, {2: (), **found}, failures) == results
    assert (results.num_tasks, results.num_samples, results.samples_per_task) == (3, 7, 3)
    assert {k: estimate.value for k, estimate in results.pass_at.items()} == pytest.approx(
        # k = 2: 1 - C(3, 2) / C(4, 2) = 1/2, and 1 - C(2, 2) / C(3, 2) = 2/3.
        {1: (1 / 4 + 1 / 3) / 3, 2: (1 / 2 + 2 / 3) / 3}
    )
    assert results.majority_at is not None
    # k = 2 of task 0, 6 pairs: right and silent 1, right and 8 half, twice. Of task 1, 3 pairs:
    # right and 8 half, twice.
    assert results.majority_at[2].value == pytest.approx(((1 + 2 / 2) / 6 + 2 / 2 / 3) / 3)
    assert results.majority_at[1].value == results.pass_at[1].value
    # 1/2, 2/3 and 0 have the mean 7/18, squared deviations of 78/324 and so the variance 13/324: as
    # many tasks as 7/18 * 11/18 / (13/324) = 77/13 of yes or no, of which Wilson's interval is -+
    # 0.3089 around 0.4326.
    assert results.pass_at[2].interval_95 == pytest.approx((0.123722, 0.741480), abs=1e-6)
    assert results.truncated == 2 / 7
    # 0 1 2 3 and 1 2 3.
    assert results.tokens.mean == 12 / 7
    assert results.tokens.percentiles[50] == 2
    assert (results.tokens.edges, results.tokens.counts) == ([0, 1, 2, 3, 4], [1, 2, 2, 2])
    assert results.grades == {"correct": 2, "no_answer": 1, "wrong": 4}
    assert results.failed == {"TimeoutError": 1}
    by_family = {name: family.pass_at_1 for name, family in results.families.items()}
    assert {name: score and score.value for name, score in by_family.items()} == {
        "even": 1 / 8,
        "odd": 1 / 3,
    }
    first, second, third = results.problems
    assert (first.num_correct, first.num_samples, first.majority, first.expected) == (
        1,
        4,
        "8",
        "7",
    )
    assert (second.place, second.mean_tokens, third.failed) == (1, 2.0, "TimeoutError: late")
    assert (first.num_truncated, second.num_truncated, third.num_truncated) == (1, 1, 0)


def test_programs_and_answers_without_canonical_form_have_no_majority() -> None:
    right = Answer("correct", "stop", 1, None, "def f(): ...")
    code = Task("t", (), "{}", kind="code")
    assert compute_results([code], {0: [right]}, {}).majority_at is None
    assert compute_results([code], {0: [right]}, {}).problems[0].expected == ""
    assert compute_results([task(0)], {0: [right]}, {}).majority_at is None


def test_added_answers_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = list[int]()
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    with closing(AnswerFolder(tmp_path, SETTINGS, 3)) as folder:
        for place in range(3):
            folder.add(place, task(place), answers(place))
            assert (
                synced[-1] == (tmp_path / "samples.jsonl").stat().st_size
                and len(synced) == place + 1
            )


def test_rows_are_valid_json(tmp_path: Path) -> None:
    with closing(AnswerFolder(tmp_path, SETTINGS, 3)) as folder:
        folder.add(5, task(5), answers(5))
    row = json.loads((tmp_path / "samples.jsonl").read_text())
    assert (row["version"], row["place"], row["task"], len(row["answers"])) == (
        3,
        5,
        "rows.jsonl:5",
        3,
    )
    assert row["answers"][0] == {
        "grade": "correct",
        "stop_reason": "length",
        "num_tokens": 5,
        "vote": "7",
        "text": answers(5)[0].text,
        "reward": None,
    }
