"""Evaluation, serving and generation from Python."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny_experiment, write_tiny_policy

import areal_jax
from areal_jax.config.experiment import Experiment
from areal_jax.errors import ConfigError

pytestmark = pytest.mark.slow

SMALL = (
    "engine.num_slots=4",
    "engine.max_new_tokens=4",
    "engine.max_prompt_tokens=64",
    "engine.prefill_chunk_tokens=32",
    "devices=1",
)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    policy = write_tiny_policy(tmp_path_factory.mktemp("tiny") / "policy")
    return tiny_experiment(policy).replace(
        **{"evaluation.num_tasks": 3, "evaluation.samples_per_task": 2, "seed": 5}
    )


def test_evaluation_returns_results_and_resumes(experiment: Experiment, tmp_path: Path) -> None:
    async def cell() -> areal_jax.Evaluated:
        return areal_jax.evaluate(experiment, folder=tmp_path / "evaluation")

    found = asyncio.run(cell())
    assert (found.results.num_tasks, found.results.num_samples) == (3, 6)
    assert found.score == found.results.pass_at[1].value
    assert (found.folder / "report.html").is_file()
    # All tasks are answered: nothing is sampled again.
    answers = (found.folder / "samples.jsonl").read_bytes()
    assert areal_jax.evaluate(experiment, folder=found.folder).score == found.score
    assert (found.folder / "samples.jsonl").read_bytes() == answers


def test_evaluation_without_a_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected an experiment, or checkpoint= of a run"):
        areal_jax.evaluate()


def test_server_answers_until_its_block_ends() -> None:
    before = {thread.name for thread in threading.enumerate()}
    with areal_jax.serve("embedded", *SMALL, served_name="mine") as server:
        request = urllib.request.Request(
            f"{server.base_url}/chat/completions",
            json.dumps(
                {"model": "mine", "messages": [{"role": "user", "content": "1+1="}]}
            ).encode(),
            {"Authorization": f"Bearer {server.api_key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.load(answer)
    assert found["usage"]["completion_tokens"] <= 4
    assert {thread.name for thread in threading.enumerate()} <= before
    with pytest.raises(OSError):
        urllib.request.urlopen(request, timeout=5)


def test_server_that_cannot_start_raises_in_the_caller() -> None:
    with pytest.raises(ConfigError, match=r"model=\./missing"):
        areal_jax.serve("./missing")


def test_generate_answers_every_prompt() -> None:
    greedy: dict[str, Any] = {"engine.temperature": 0.0}
    texts = ["What is 1 + 1?", "What is 2 + 2?"]
    answers = areal_jax.generate(texts, "embedded", *SMALL, num_samples=2, **greedy)
    assert [len(samples) for samples in answers] == [2, 2]
    assert all(first == second for first, second in answers)
    turns = [[{"role": "user", "content": texts[0]}]]
    assert areal_jax.generate(turns, "embedded", *SMALL, **greedy) == [[answers[0][0]]]
