"""Graded answers of an evaluation, and their folder, from which an interrupted evaluation
resumes.
"""

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
    """One graded answer to a task."""

    grade: ResultKind
    stop_reason: StopReason
    num_tokens: int
    """Number of sampled tokens."""
    vote: str | None
    """Canonical form of the extracted answer, for majority votes; None without an answer."""
    text: str
    """Text after the first prompt, including tool results and feedback between turns."""
    reward: float | None = None
    """None in folders of earlier releases without raw rewards."""


def make_answer(sample: Sample, tokenizer: Tokenizer, accept_plain: bool) -> Answer:
    """Make an answer of a sample.

    Args:
        sample: the sample.
        tokenizer: the policy's tokenizer.
        accept_plain: as `rewards.accept_plain`.
    """
    sampled = np.flatnonzero(sample.loss_mask)
    if not len(sampled):
        return Answer(sample.grade, sample.stop_reason, 0, None, "", sample.reward)
    # The answer is in the last turn.
    last_turn = sampled[np.flatnonzero(np.diff(sampled, prepend=-2) > 1)[-1]]
    return Answer(
        sample.grade,
        sample.stop_reason,
        len(sampled),
        extract_vote(tokenizer.decode(sample.tokens[last_turn : sampled[-1] + 1]), accept_plain),
        tokenizer.decode(sample.tokens[sampled[0] :]),
        sample.reward,
    )


def extract_vote(text: str, accept_plain: bool) -> str | None:
    """Extract the canonical answer of a text as the grader does; None without an answer."""
    answer = extract_answer(text, accept_plain)
    return None if answer is None else canonical(answer)


class AnswerFolder:
    """Answers by index of their task, on disk as soon as they are graded. For one thread."""

    def __init__(self, path: Path, settings: Mapping[str, Any], version: int) -> None:
        """Open a new folder, or the folder of an evaluation with the same settings.

        Args:
            path: the folder.
            settings: all settings that determine the answers, as JSON.
            version: version of the policy.

        Raises:
            ValueError: the folder holds an evaluation with other settings; the message names them.
        """
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
        """Store the answers to a task; on return they are on disk."""
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
        """Close the file."""
        self._lines.close()

    def _require_same(self, settings: Mapping[str, Any]) -> None:
        file = self.path / SETTINGS
        if not file.exists():
            if (self.path / SAMPLES).exists():
                raise ValueError(
                    f"{self.path}: expected {SETTINGS} next to {SAMPLES}, found none; set another "
                    "--folder"
                )
            write_atomically(file, json.dumps(settings, indent=2) + "\n")
            return
        stored = json.loads(file.read_text(encoding="utf-8"))
        differing = [key for key in {**stored, **settings} if stored.get(key) != settings.get(key)]
        if differing:
            differences = "; ".join(
                f"{key} is {stored.get(key)!r} there and {settings.get(key)!r} here"
                for key in differing
            )
            raise ValueError(
                f"{self.path} holds an evaluation with other settings: {differences}; set another "
                "--folder=DIR"
            )
