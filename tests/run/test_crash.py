"""Faults of a run started by the command line: kill -9, Ctrl-C, and a loss that is not finite."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from run_laws import broken_laws
from tiny_runs import tiny_settings

from areal_jax.metrics import jsonl
from areal_jax.metrics.sample_parts import SampleParts
from areal_jax.metrics.sinks import SAMPLES as SAMPLES_FILE

GROUPS, SAMPLES, STEPS = 4, 2, 12
SMALL = (  # steps that take milliseconds
    f"num_steps={STEPS}",
    "tasks.num_tasks=600",
    "placement.simulated_devices=none",
    f"rollout.groups_per_batch={GROUPS}",
    f"rollout.samples_per_group={SAMPLES}",
    "rollout.max_staleness=2",
    "engine.num_slots=16",
    "engine.max_new_tokens=64",
    "engine.steps_per_dispatch=4",
    "engine.prefill_chunk_tokens=32",
    "trainer.num_mini_batches=1",
    "trainer.rows_per_micro_batch=4",
    "evaluation.every_steps=0",
    "checkpoint.every_steps=2",
    "checkpoint.export_hf=false",
    "metrics.tensorboard=false",
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


def wait_for_claim(process: subprocess.Popen[str], run: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (run / "claim.json").exists():
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.02)


def finished(process: subprocess.Popen[str], status: int = 0) -> str:
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == status, output
    return output


@pytest.fixture(scope="module")
def killed_twice(
    tmp_path_factory: pytest.TempPathFactory, of_a_command: dict[str, str]
) -> tuple[Path, str]:
    """A run that was killed twice and has ended, and what it said at last."""
    folder = tmp_path_factory.mktemp("killed")
    run, settings = folder / "run", (*SMALL, *tiny_settings(folder))
    process = start(folder, of_a_command, "--exp=aime", f"--run-folder={run}", *settings)
    for num_steps in (5, 9):
        wait_for_steps(process, run, num_steps)
        process.kill()
        process.communicate()
        process = start(folder, of_a_command, f"--resume={run}")
    return run, finished(process)


@pytest.mark.slow
def test_a_run_killed_twice_loses_and_repeats_no_task(killed_twice: tuple[Path, str]) -> None:
    run, output = killed_twice
    assert "resuming from the checkpoint of version" in output
    assert broken_laws(run, num_steps=STEPS, groups=GROUPS, samples=SAMPLES, max_staleness=2) == []


@pytest.mark.slow
def test_ctrl_c_ends_with_a_checkpoint_and_loses_no_task(
    tmp_path: Path, of_a_command: dict[str, str]
) -> None:
    """Nor is one repeated, and while the run runs, no other one may use its folder."""
    run, settings = tmp_path / "run", (*SMALL, *tiny_settings(tmp_path))
    own = "--exp=aime", f"--run-folder={run}", *settings, "checkpoint.every_steps=0"
    process = start(tmp_path, of_a_command, *own, "num_steps=100000")
    wait_for_claim(process, run)
    others = [start(tmp_path, of_a_command, *each) for each in ([f"--resume={run}"], own)]
    for other in others:
        assert f"{run} is in use by process {process.pid} on " in finished(other, 2)
    wait_for_steps(process, run, 3)
    process.send_signal(signal.SIGINT)
    output, done = finished(process, 130), steps_done(run)
    stopped = f"stopped by SIGINT after {done} of 100000 steps"
    assert re.search(f"areal_jax: {stopped}; .*areal-train --resume={run} resumes from", output)
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert int(checkpoint.name) == done >= 3
    assert (run / "report.html").is_file() and (run / "learning_curve.png").is_file()

    process = start(tmp_path, of_a_command, f"--resume={run}", f"num_steps={done + 8}")
    wait_for_steps(process, run, done + 4)
    process.send_signal(signal.SIGINT)
    finished(process, 130)
    finished(start(tmp_path, of_a_command, f"--resume={run}"))
    kept = {"groups": GROUPS, "samples": SAMPLES, "max_staleness": 2}
    assert broken_laws(run, num_steps=done + 8, **kept) == []


@pytest.mark.slow
def test_sigterm_during_startup_exits_with_a_message(
    tmp_path: Path, of_a_command: dict[str, str]
) -> None:
    run = tmp_path / "run"
    process = start(tmp_path, of_a_command, "--exp=aime", f"--run-folder={run}", *SMALL)
    wait_for_claim(process, run)
    process.send_signal(signal.SIGTERM)
    assert "areal_jax: interrupted by SIGTERM; no" in finished(process, 143)


@pytest.mark.slow
def test_resume_refuses_metrics_with_a_gap(
    killed_twice: tuple[Path, str], tmp_path: Path, of_a_command: dict[str, str]
) -> None:
    run = shutil.copytree(killed_twice[0], tmp_path / "run")
    metrics, config = run / "metrics.jsonl", (run / "config.json").read_text()
    rows = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(rows[:1] + rows[3:]))
    refused = finished(start(tmp_path, of_a_command, f"--resume={run}", "num_steps=14"), 2)
    assert (
        "metrics.jsonl has no rows of versions 1 to 2" in refused
        and f"move {metrics} away" in refused
    )
    assert (run / "config.json").read_text() == config
    metrics.rename(tmp_path / "away")
    finished(start(tmp_path, of_a_command, f"--resume={run}", "num_steps=14"))
    assert [row["version"] for row in jsonl.read(metrics) if "trainer/loss" in row] == [12, 13]
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
        *tiny_settings(tmp_path),
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
