"""Faults of a run started by the command line: kill -9, Ctrl-C, and a loss that is not finite."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from run_laws import broken_laws

from areal_jax.metrics import jsonl
from areal_jax.metrics.sample_parts import SampleParts
from areal_jax.metrics.sinks import SAMPLES as SAMPLES_FILE

GROUPS, SAMPLES, STEPS = 4, 2, 12
SMALL = (  # steps that take milliseconds, of which some have a gradient
    f"num_steps={STEPS}",
    "tasks.num_tasks=600",
    "placement.simulated_devices=none",
    f"rollout.groups_per_batch={GROUPS}",
    f"rollout.samples_per_group={SAMPLES}",
    "rollout.max_staleness=2",
    "engine.num_slots=16",
    "engine.max_new_tokens=64",
    "engine.steps_per_dispatch=4",
    "trainer.num_mini_batches=1",
    "trainer.rows_per_micro_batch=4",
    "evaluation.every_steps=0",
    "checkpoint.every_steps=2",
    "checkpoint.export_hf=false",
    "metrics.samples_part_bytes=20000",  # closes parts every few steps
)
TIMEOUT_S = 240.0


def start(folder: Path, environment: Mapping[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "areal_jax.train", *arguments],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def steps_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    return sum("trainer/loss" in row for row in jsonl.read(path)) if path.exists() else 0


def wait_for_steps(process: subprocess.Popen[str], run: Path, num_steps: int) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while steps_done(run) < num_steps:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline_s, (
            f"{steps_done(run)} of {num_steps} steps after {TIMEOUT_S} s"
        )
        time.sleep(0.02)


def finished(process: subprocess.Popen[str], status: int = 0) -> str:
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == status, output
    return output


@pytest.mark.slow
def test_a_run_killed_twice_loses_and_repeats_no_task(
    tmp_path: Path, of_a_command: dict[str, str]
) -> None:
    run = tmp_path / "run"
    process = start(tmp_path, of_a_command, "--exp=aime", f"--run-folder={run}", *SMALL)
    for num_steps in (5, 9):
        wait_for_steps(process, run, num_steps)
        process.kill()
        process.communicate()
        process = start(tmp_path, of_a_command, f"--resume={run}")
    output = finished(process)
    assert "resuming from the checkpoint of version" in output

    assert broken_laws(run, num_steps=STEPS, groups=GROUPS, samples=SAMPLES, max_staleness=2) == []


@pytest.mark.slow
def test_a_run_stopped_twice_by_ctrl_c_loses_and_repeats_no_task(
    tmp_path: Path, of_a_command: dict[str, str]
) -> None:
    run = tmp_path / "run"
    process = start(
        tmp_path,
        of_a_command,
        "--exp=aime",
        f"--run-folder={run}",
        *SMALL,
        "checkpoint.every_steps=0",
    )
    for num_steps in (4, 8):
        wait_for_steps(process, run, num_steps)
        process.send_signal(signal.SIGINT)
        finished(process, 130)
        process = start(tmp_path, of_a_command, f"--resume={run}")
    finished(process)

    assert broken_laws(run, num_steps=STEPS, groups=GROUPS, samples=SAMPLES, max_staleness=2) == []


@pytest.mark.slow
def test_ctrl_c_ends_with_a_checkpoint_and_a_report(
    tmp_path: Path, of_a_command: dict[str, str]
) -> None:
    run = tmp_path / "run"
    process = start(
        tmp_path,
        of_a_command,
        "--exp=aime",
        f"--run-folder={run}",
        *SMALL,
        "num_steps=100000",
        "checkpoint.every_steps=0",
    )
    wait_for_steps(process, run, 3)
    for arguments in ([f"--resume={run}"], ["--exp=aime", f"--run-folder={run}", *SMALL]):
        refused = finished(start(tmp_path, of_a_command, *arguments), 2)
        assert f"{run} is in use by process {process.pid} on " in refused
    process.send_signal(signal.SIGINT)
    output = finished(process, 130)
    done = f"stopped by SIGINT after {steps_done(run)} of 100000 steps"
    assert re.search(f"areal_jax: {done}; .*areal-train --resume={run} resumes from", output)
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert int(checkpoint.name) == steps_done(run) >= 3
    assert (run / "report.html").is_file() and (run / "learning_curve.png").is_file()


@pytest.mark.slow
def test_sigterm_during_startup_exits_with_a_message(
    tmp_path: Path, of_a_command: dict[str, str]
) -> None:
    run = tmp_path / "run"
    process = start(tmp_path, of_a_command, "--exp=aime", f"--run-folder={run}", *SMALL)
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (run / "claim.json").exists():
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert "areal_jax: interrupted by SIGTERM; no" in finished(process, 143)


@pytest.mark.slow
def test_resume_refuses_metrics_with_a_gap(tmp_path: Path, of_a_command: dict[str, str]) -> None:
    run = tmp_path / "run"
    finished(
        start(tmp_path, of_a_command, "--exp=aime", f"--run-folder={run}", *SMALL, "num_steps=4")
    )
    metrics, config = run / "metrics.jsonl", (run / "config.json").read_text()
    rows = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(rows[:1] + rows[3:]))
    refused = finished(start(tmp_path, of_a_command, f"--resume={run}", "num_steps=6"), 2)
    assert (
        "metrics.jsonl has no rows of versions 1 to 2" in refused
        and f"move {metrics} away" in refused
    )
    assert (run / "config.json").read_text() == config
    metrics.rename(tmp_path / "away")
    finished(start(tmp_path, of_a_command, f"--resume={run}", "num_steps=6"))
    assert [row["version"] for row in jsonl.read(metrics) if "trainer/loss" in row] == [4, 5]
    (run / "config.json").write_text(config.replace('"areal_jax.run": "', '"areal_jax.run": "0'))
    assert "config.json is of another run" in finished(
        start(tmp_path, of_a_command, f"--resume={run}"), 2
    )


@pytest.mark.slow
def test_infinite_loss_ends_the_run_and_keeps_samples_and_checkpoints(
    tmp_path: Path, of_a_command: dict[str, str]
) -> None:
    run = tmp_path / "run"
    # A huge learning rate: within a few steps no logit is finite.
    process = start(
        tmp_path,
        of_a_command,
        "--exp=aime",
        f"--run-folder={run}",
        *SMALL,
        "policy.random_init=true",
        "num_steps=1000",
        "checkpoint.every_steps=1",
        "checkpoint.keep=1000",
        "trainer.optimizer.learning_rate=1e30",
    )
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1, output
    assert "training diverged" in output and "learning_rate" in output and "Traceback" not in output
    done = steps_done(run)
    # No second save of the last version: the failed batch must not be resumed from.
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        f"{version}" for version in range(1, done + 1)
    }
    assert f"--resume={run} resumes from the checkpoint of version {done}" in output
    rows = list(SampleParts(run / SAMPLES_FILE).read())
    assert len(rows) == done * GROUPS * SAMPLES
