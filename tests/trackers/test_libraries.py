"""A run arrives at wandb, trackio and MLflow through their own libraries, without a network.

Needs the extras `wandb`, `trackio` and `mlflow`, and therefore an environment of its own; elsewhere
these tests are not collected.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from areal_jax.metrics import names
from areal_jax.metrics.config import METRICS
from areal_jax.metrics.jsonl import read

RUN = (
    "--exp=aime",
    "num_steps=2",
    "rollout.groups_per_batch=2",
    "rollout.samples_per_group=2",
    "engine.num_slots=4",
    "engine.prefill_chunk_tokens=32",
    "trainer.num_mini_batches=1",
    "evaluation.num_tasks=4",
    "metrics.trackers=wandb,trackio,mlflow",
    "metrics.project=offline",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, of_a_command: dict[str, str]) -> Path:
    """A run that reported to all trackers, and then resumed for one more step."""
    home = tmp_path_factory.mktemp("trackers")
    for arguments in (
        (*RUN, f"--run-folder={home / 'run'}"),
        (f"--resume={home / 'run'}", "num_steps=3"),
    ):
        done = train(home, of_a_command, *arguments)
        assert done.returncode == 0, done.stderr
        assert " failed: " not in done.stderr, done.stderr
    return home


def train(
    home: Path, inherited: dict[str, str], *arguments: str, **env: str
) -> subprocess.CompletedProcess[str]:
    offline = {
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(home / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{home / 'mlflow.db'}",
        "HOME": str(home),
    }
    return subprocess.run(
        [sys.executable, "-m", "areal_jax.train", *arguments],
        env=inherited | offline | env,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=250,
    )


def expected(home: Path, name: str) -> set[tuple[int, float]]:
    """Versions and values in metrics.jsonl, from which a resumption cut the last evaluation of the
    process before."""
    rows = read(home / "run" / METRICS)
    return {(row["version"], row[name]) for row in rows if name in row}


def test_trackio_has_the_rows_of_the_run_and_of_its_resumption(folder: Path) -> None:
    (path,) = (folder / "trackio").glob("offline*.db")
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    assert len({name for name, *_ in rows}) == 1
    found: list[tuple[int, Mapping[str, float]]] = [
        (step, json.loads(written)) for _, step, written in rows
    ]
    for name in (names.REWARD, names.PASS_AT_1):
        series = {(step, metrics[name]) for step, metrics in found if name in metrics}
        assert series >= expected(folder, name) and len(expected(folder, name)) >= 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow", "ignore:.*noload.*")
def test_mlflow_has_one_run_with_settings_and_metrics(folder: Path) -> None:
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("offline")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "run"
    assert run.data.params["rollout.groups_per_batch"] == "2"
    # MLflow refuses `@` in names.
    history = client.get_metric_history(run.info.run_id, "evaluation/pass at 1")
    assert {(each.step, each.value) for each in history} >= expected(folder, names.PASS_AT_1)
    rewards = client.get_metric_history(run.info.run_id, names.REWARD)
    assert {(each.step, each.value) for each in rewards} == expected(folder, names.REWARD)


def test_wandb_writes_an_offline_run_to_the_run_folder(folder: Path) -> None:
    run_id = json.loads((folder / "run" / "config.json").read_text())["areal_jax.run"]
    files = [*(folder / "run" / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")]
    assert len(files) == 2  # one of each process; `wandb sync` joins them by the id
    for file in files:
        assert names.PASS_AT_1.encode() in file.read_bytes()


@pytest.mark.parametrize("tracker", ["mlflow"])
def test_tracker_that_cannot_start_is_refused(
    tracker: str, tmp_path: Path, of_a_command: dict[str, str]
) -> None:
    done = train(
        tmp_path,
        of_a_command,
        *(each for each in RUN if "trackers" not in each),
        f"metrics.trackers={tracker}",
        f"--run-folder={tmp_path / 'run'}",
        MLFLOW_TRACKING_URI="http://127.0.0.1:1",
        MLFLOW_HTTP_REQUEST_MAX_RETRIES="0",
    )
    assert done.returncode == 2
    assert "metrics.trackers=mlflow: mlflow could not start a run (" in done.stderr
