"""Recorded experts between the processes of a run on Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import write_tiny_experts

from areal_jax.metrics import jsonl
from areal_jax.metrics.config import METRICS
from areal_jax.run.rollout_log import RolloutLog, read_rollouts

SETTINGS = (
    "--exp=aime",
    "num_steps=2",
    "policy.random_init=true",
    "rollout.max_staleness=1",
    "rollout.groups_per_batch=2",
    "rollout.samples_per_group=4",
    "trainer.num_mini_batches=1",
    "trainer.rows_per_micro_batch=2",
    "engine.router_replay=true",
    "engine.num_slots=8",
    "engine.max_new_tokens=8",
    "engine.prefill_chunk_tokens=32",
    "engine.steps_per_dispatch=4",
    "evaluation.every_steps=0",
    "metrics.rollouts=true",
    "metrics.tensorboard=false",
)
CLUSTER = (
    "launch=ray",
    "launch.rollout_engines=1",
    "launch.attempts=0",
    "checkpoint.export_hf=false",
)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.ray_run
def test_recorded_experts_reach_trainer_hosts(tmp_path: Path, of_a_command: dict[str, str]) -> None:
    policy = write_tiny_experts(tmp_path / "policy")
    reward = tmp_path / "reward.py"
    reward.write_text("def parity(task, answer):\n    return len(answer) % 2\n")

    def train(folder: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "areal_jax.train", f"--run-folder={tmp_path / folder}"]
        return subprocess.run(
            [*command, *arguments], env=of_a_command, capture_output=True, text=True, timeout=500
        )

    own = f"policy.path={policy}", f"rewards.function={reward}:parity"
    done = train("run", *SETTINGS, *own, *CLUSTER)
    assert done.returncode == 0, done.stderr
    batches = [read_rollouts(tmp_path / "run", version) for version in range(2)]
    samples = [sample for batch in batches for group in batch for sample in group.samples]
    assert len(samples) == 16
    for sample in samples:
        assert sample.experts is not None and sample.experts.shape == (len(sample.tokens), 2, 2)
        assert sample.experts[:-1].max() < 4

    # One process computes the same parameters from the experts that the run has recorded.
    done = train("again", f"--replay={tmp_path / 'run'}", "launch=Local")
    assert done.returncode == 0, done.stderr
    assert "parameters are equal to the run's at all versions 1 to 2" in done.stdout
    # From others it does not.
    first = samples[0].experts
    assert first is not None
    first[:-1] = (first[:-1] + 1) % 4
    log = RolloutLog(tmp_path / "run")
    log.write(0, batches[0])
    log.close()
    done = train("other", f"--replay={tmp_path / 'run'}", "launch=Local")
    assert "first at version 1" in done.stdout, done.stderr
    rows = list(jsonl.read(tmp_path / "run" / METRICS))
    # Before the first update engine and trainer have equal weights.
    assert rows[0]["trainer/log_ratio_rms"] < 1e-4
    assert np.isfinite(rows[1]["trainer/log_ratio_rms"])
