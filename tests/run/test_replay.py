"""Replays: equal parameters at every version, counterfactuals, damaged and missing rollouts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import tiny_settings

from areal_jax.cli.train import main
from areal_jax.metrics import jsonl
from areal_jax.metrics.config import METRICS
from areal_jax.run.replay import DIGEST
from areal_jax.run.rollout_log import ASSIGNMENTS, path_of, read_rollouts

SETTINGS = (
    "--exp=aime",
    "num_steps=6",
    "rollout.max_staleness=4",
    "rollout.groups_per_batch=4",
    "rollout.samples_per_group=4",
    "trainer.num_mini_batches=2",
    "engine.num_slots=16",
    "engine.max_new_tokens=32",
    "engine.prefill_chunk_tokens=32",
    "evaluation.every_steps=0",
    "metrics.tensorboard=false",
)


def digests(folder: Path) -> dict[int, float]:
    return {int(row["version"]): row[DIGEST] for row in jsonl.read(folder / METRICS)}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "areal_jax.train", *arguments]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, of_a_command: dict[str, str]) -> Path:
    """A run that was killed after its second checkpoint, and resumed."""
    parent = tmp_path_factory.mktemp("replay")
    folder, settings = parent / "run", (*SETTINGS, *tiny_settings(parent))
    arguments = (*settings, "checkpoint.every_steps=2", f"--run-folder={folder}")
    process = subprocess.Popen(command(*arguments), env=of_a_command, stdout=subprocess.DEVNULL)
    deadline_s = time.monotonic() + 240
    while not path_of(folder, 4).exists():
        assert time.monotonic() < deadline_s and process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    resumed = command(f"--resume={folder}")
    subprocess.run(resumed, env=of_a_command, check=True, capture_output=True, timeout=240)
    assert sorted(digests(folder)) == list(range(6))
    return folder


def replay(
    recorded: Path, folder: Path, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    wanted = command(f"--replay={recorded}", f"--run-folder={folder}", *arguments)
    return subprocess.run(wanted, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replay_of_a_killed_run_is_bit_exact_at_every_version(
    recorded: Path, tmp_path: Path, of_a_command: dict[str, str]
) -> None:
    done = replay(recorded, tmp_path / "again", of_a_command)
    assert done.returncode == 0, done.stderr
    assert "parameters are equal to the run's at all versions 1 to 6" in done.stdout
    found = digests(tmp_path / "again")
    assert found == digests(recorded)
    assert len(set(found.values())) == 6  # every step changed the parameters
    first, second = (
        (folder / "policy" / "model.safetensors").read_bytes()
        for folder in (recorded, tmp_path / "again")
    )
    assert first == second


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_engine_of_every_trained_request_is_recorded(recorded: Path) -> None:
    assigned: dict[str, int] = {}
    rows = list(jsonl.read(path_of(recorded, 0).with_name(ASSIGNMENTS)))
    for row in rows:
        assigned |= dict(row["assignments"])
        trained = {group.id for group in read_rollouts(recorded, row["version"])}
        # The one request of a group is a single turn's.
        assert trained <= {int(request.partition(".")[0]) for request in assigned}
    assert rows[-1]["version"] == 5 and set(assigned.values()) == {0}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replay_with_another_objective_is_a_counterfactual(
    recorded: Path, tmp_path: Path, of_a_command: dict[str, str]
) -> None:
    changed = "trainer.optimizer.learning_rate=1e-3", "trainer.loss=PPO", "--until=4"
    done = replay(recorded, tmp_path / "other", of_a_command, *changed)
    assert done.returncode == 0, done.stderr
    found, known = digests(tmp_path / "other"), digests(recorded)
    assert sorted(found) == [0, 1, 2, 3]
    assert all(found[version] != known[version] for version in found)
    # The rollouts are another policy's, further from this one with the steps. How much depends on
    # which versions the recorded run happened to sample with.
    ratios = [row["trainer/log_ratio_rms"] for row in jsonl.read(tmp_path / "other" / METRICS)]
    assert ratios[3] > 1.2 * ratios[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_changed_reward_is_found_at_its_version(
    recorded: Path, tmp_path: Path, of_a_command: dict[str, str]
) -> None:
    path = path_of(recorded, 2)
    whole = path.read_bytes()
    rewards = [sample.reward for group in read_rollouts(recorded, 2) for sample in group.samples]
    # Rewards are one column of float64.
    column = np.array(rewards).tobytes()
    assert whole.count(column) == 1
    changed = np.array([-rewards[0], *rewards[1:]])
    try:
        path.write_bytes(whole.replace(column, changed.tobytes()))
        done = replay(recorded, tmp_path / "changed", of_a_command)
        assert done.returncode == 1
        assert "first at version 3" in done.stderr
    finally:
        path.write_bytes(whole)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_missing_or_damaged_rollouts_are_refused(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # One device, as the recorded run has: this process has eight.
    placement = "placement.train_devices=1", "placement.rollout_devices=1"
    folder = f"--run-folder={tmp_path / 'longer'}"
    assert main([f"--replay={recorded}", folder, *placement, "--until=9"]) == 2
    shown = capsys.readouterr().err
    assert "expected a run with at least 9 recorded steps, found 6" in shown
    path = path_of(recorded, 1)
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:-3])
        with pytest.raises(ValueError, match=r"000001\.bin: damaged"):
            read_rollouts(recorded, 1)
        path.unlink()
        with pytest.raises(ValueError, match=r"metrics\.rollouts=true"):
            read_rollouts(recorded, 1)
    finally:
        path.write_bytes(whole)
