"""A run folder with everything that a report shows, written by the run's own parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from areal_jax.metrics import names
from areal_jax.metrics.config import MetricsConfig
from areal_jax.metrics.description import write_description
from areal_jax.metrics.samples import TrainedSample
from areal_jax.metrics.sinks import Sinks

EVIL = (
    "</pre></script><script>alert('https://evil.example/x')</script>"
    "<img src=http://evil.example/y onerror=alert(1)>&amp;"
)
"""Text that would take over a page that does not escape it."""

WORDS = ("two ", "words", EVIL, "\\boxed{7}")


def decode(tokens: np.ndarray) -> str:
    return "".join(WORDS[token % len(WORDS)] for token in tokens)


class RunFolder:
    """Writes the steps of a run; of each step's two groups the first has a wrong sample."""

    def __init__(self, folder: Path, num_steps: int = 100) -> None:
        self.path = folder
        folder.mkdir(exist_ok=True)
        self.num_done = 0
        self._sinks = Sinks(folder, MetricsConfig(tensorboard=False), decode=decode)
        settings = {"num_steps": num_steps, "policy.path": EVIL, "workflow": "SingleTurn"}
        write_description(folder, f"policy {EVIL}", settings, "8 x cpu")

    def step(self, count: int = 1) -> None:
        """Write steps with their samples."""
        for version in range(self.num_done, self.num_done + count):
            wave = float(np.sin(version / 5))
            self._sinks.write(
                version,
                {
                    names.REWARD: wave + version / 50,
                    "trainer/reward_std": 1.0,
                    "trainer/entropy": 0.5 / (1 + version / 20),
                    "trainer/grad_norm": 0.1,
                    "trainer/groups_without_signal": 1.0,
                    "trainer/seconds_step": 1.0,
                    "trainer/seconds_update": 0.8,
                    "rollout/batch_wait_s": 0.001 * version,
                    "rollout/accepted": 2.0 * version,
                    names.STALENESS_MAX: 1.0,
                    "health/no_signal": float(version >= 10),
                    "health/no_gradient": 0.0,
                },
            )
            self._sinks.write_samples(
                version,
                [
                    sample(version, group, number)
                    for group in (2 * version, 2 * version + 1)
                    for number in range(3)
                ],
            )
        self.num_done += count
        self._sinks.flush()

    def evaluate(self, score: float) -> None:
        """Write an evaluation of the newest version."""
        metrics = {names.PASS_AT_1: score, names.PASS_AT_1_ERROR: 0.02}
        families = {f"evaluation/family/{name}": score for name in ("algebra", "counting")}
        self._sinks.write(self.num_done, metrics | families)

    def close(self) -> None:
        """Close the files."""
        self._sinks.close()


def sample(version: int, group: int, number: int) -> TrainedSample:
    is_wrong = group % 2 == 0 and number == 0
    versions = np.array([-1, -1, max(0, version - 1), version, version, version], np.int32)
    sampled = versions >= 0
    return TrainedSample(
        task=f"{'odd' if group % 2 else 'even'}-{version}",
        group=group,
        number=number,
        tokens=np.arange(6, dtype=np.int32),
        loss_mask=sampled,
        behave_logp=np.where(sampled, np.float32(-1.0), np.float32(0.0)),
        versions=versions,
        stale=np.zeros(6, np.bool_),
        reward=0.0 if is_wrong else 1.0,
        grade="wrong" if is_wrong else "correct",
        stop_reason="stop",
        expected="seven",
    )
