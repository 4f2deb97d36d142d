"""Graded answers of an evaluation, and the folder that keeps them: task by task, so that a restart
resumes from there."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_jax.metrics.files import write_atomically
from areal_jax.metrics.jsonl import JsonLines, cut, read
from areal_jax.protocols import Tokenizer
from areal_jax.records import ResultKind, Sample, StopReason, Task
from areal_jax.rewards.math_answers import canonical, extract_answer

SETTINGS, SAMPLES = "settings.json", "samples.jsonl"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to a task."""

    grade: ResultKind
    stop_reason: StopReason
    num_tokens: int
    """That the policy drew."""
    vote: str | None
    """The answer found in the text, in the form by which votes are counted; None where there is
    none."""
    text: str
    """From the first word of the policy on; what tools and feedback said between its words is part
    of it."""
    reward: float | None = None
    """None in folders of earlier releases, where rewards are not raw."""


def make_answer(sample: Sample, tokenizer: Tokenizer, accept_plain: bool) -> Answer:
    """What is kept of a sample. Args: accept_plain: of the grader's settings."""
    sampled = np.flatnonzero(sample.loss_mask)
    if not len(sampled):
        return Answer(sample.grade, sample.stop_reason, 0, None, "", sample.reward)
    # The last words of the policy hold its answer; what it said in earlier turns was not its last
    # word.
    said_last = sampled[np.flatnonzero(np.diff(sampled, prepend=-2) > 1)[-1]]
    return Answer(
        sample.grade,
        sample.stop_reason,
        len(sampled),
        extract_vote(tokenizer.decode(sample.tokens[said_last : sampled[-1] + 1]), accept_plain),
        tokenizer.decode(sample.tokens[sampled[0] :]),
        sample.reward,
    )


def extract_vote(text: str, accept_plain: bool) -> str | None:
    """The answer that a text votes for, as the grader finds it."""
    answer = extract_answer(text, accept_plain)
    return None if answer is None else canonical(answer)


class AnswerFolder:
    """Answers by the place of their task, on disk as soon as they are graded. One thread writes."""

    def __init__(self, path: Path, settings: Mapping[str, Any], version: int) -> None:
        """Open a new folder, or one that an evaluation with the same settings has left.

        Args: settings: all that decides the answers, as JSON. version: of the policy that answers.
        ValueError names what differs where the folder holds an evaluation with other settings."""
        self.path, self._version = path, version
        path.mkdir(parents=True, exist_ok=True)
        self._require_same(json.loads(json.dumps(settings)))
        samples = path / SAMPLES
        cut(samples, version + 1)  # a row torn by a crash
        rows = read(samples) if samples.exists() else ()
        self.found = {
            row["place"]: tuple(Answer(**answer) for answer in row["answers"]) for row in rows
        }
        self._lines = JsonLines(samples)

    def add(self, place: int, task: Task, answers: Sequence[Answer]) -> None:
        """Keep the answers to the task at a place; on return they are on disk."""
        row = {
            "time_s": time.time(),
            "place": place,
            "task": task.id,
            "answers": [asdict(answer) for answer in answers],
        }
        self._lines.append(self._version, row)
        self._lines.sync()
        self.found[place] = tuple(answers)

    def close(self) -> None:
        self._lines.close()

    def _require_same(self, settings: Mapping[str, Any]) -> None:
        file = self.path / SETTINGS
        if not file.exists():
            if (self.path / SAMPLES).exists():
                raise ValueError(
                    f"{self.path} holds a {SAMPLES} without {SETTINGS}, of something else; "
                    "give "
                    "another --folder"
                )
            write_atomically(file, json.dumps(settings, indent=2) + "\n")
            return
        there = json.loads(file.read_text(encoding="utf-8"))
        differing = [key for key in {**there, **settings} if there.get(key) != settings.get(key)]
        if differing:
            reported = "; ".join(
                f"{key} is {there.get(key)!r} there and {settings.get(key)!r} here"
                for key in differing
            )
            raise ValueError(
                f"{self.path} holds an evaluation with other settings: {reported}. Give "
                "another "
                "--folder=DIR"
            )
