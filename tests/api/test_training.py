"""Training from Python: results, folders, callbacks, running event loops, Ctrl-C, and what a run
gives back.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_runs import tiny_experiment, write_tiny_policy

import areal_jax
from areal_jax import STOP, Callback, EarlyStopping, KeepBest
from areal_jax.checkpoint.folders import saved_versions
from areal_jax.config.experiment import Experiment
from areal_jax.config.load import write_config
from areal_jax.config.policy_names import RunCheckpoint, named_policy
from areal_jax.errors import ConfigError
from areal_jax.parallel.config import PlacementConfig


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """Half of the answers of a policy that knows nothing are right, so that it learns."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "reward.py").write_text("def even(task, answer):\n    return len(answer) % 2 == 0\n")
    return tiny_experiment(write_tiny_policy(folder / "policy")).replace(
        f"rewards.function={folder / 'reward.py'}:even"
    )


class Recorded(Callback):
    """Records the names and versions of all events."""

    def __init__(self) -> None:
        self.events = list[tuple[str, int]]()
        self.ended = ""

    def on_step(self, metrics: Any) -> None:
        self.events.append(("step", metrics["version"]))

    def on_evaluation(self, metrics: Any) -> None:
        self.events.append(("evaluation", metrics["version"]))

    def on_checkpoint(self, version: int, folder: Path) -> None:
        assert folder.name == str(version)
        self.events.append(("checkpoint", version))

    def on_end(self, result: areal_jax.Result) -> None:
        self.ended = result.ended


@pytest.mark.slow
def test_awaited_result_has_columns_paths_and_evaluations(
    experiment: Experiment, tmp_path: Path
) -> None:
    recorded = Recorded()
    evaluated = experiment.replace(**{"evaluation.every_steps": 2, "evaluation.num_tasks": 2})
    result = asyncio.run(areal_jax.train_async(evaluated, tmp_path / "run", callbacks=[recorded]))
    assert (result.ended, result.version, result.run_folder) == ("completed", 2, tmp_path / "run")
    metrics = result.metrics()
    assert metrics["version"].tolist() == [0, 1]
    assert metrics["version"].dtype == np.int64
    assert metrics["trainer/samples"].tolist() == [8.0, 8.0]
    assert [row["version"] for row in result.evaluations] == [0, 2]
    assert result.policy_folder == tmp_path / "run" / "policy"
    # Checkpoints of a run this short come at its end, before its last evaluation.
    assert recorded.events == [
        ("evaluation", 0),
        ("step", 0),
        ("step", 1),
        ("checkpoint", 2),
        ("evaluation", 2),
    ]
    assert recorded.ended == "completed"


@pytest.mark.slow
def test_cancelled_train_async_leaves_a_checkpoint(experiment: Experiment, tmp_path: Path) -> None:
    class Cancels(Callback):
        def on_step(self, metrics: Any) -> None:
            if metrics["version"] == 0:
                loop.call_soon_threadsafe(running.cancel)

    async def main() -> None:
        nonlocal loop, running
        loop = asyncio.get_running_loop()
        running = asyncio.create_task(
            areal_jax.train_async(
                experiment.replace(num_steps=1000), tmp_path / "run", callbacks=[Cancels()]
            )
        )
        with pytest.raises(asyncio.CancelledError):
            await running

    loop: asyncio.AbstractEventLoop
    running: asyncio.Task[areal_jax.Result]
    asyncio.run(main())
    (version,) = saved_versions(tmp_path / "run" / "checkpoints")
    assert 1 <= version < 1000


@pytest.mark.slow
def test_stopped_run_has_a_checkpoint_and_resumes_from_the_folder_alone(
    experiment: Experiment, tmp_path: Path
) -> None:
    class StopsAtOne(Recorded):
        def on_step(self, metrics: Any) -> Any:
            super().on_step(metrics)
            return STOP if metrics["version"] == 1 else None

    stops, folder = StopsAtOne(), tmp_path / "run"
    result = areal_jax.train(experiment.replace(num_steps=12), folder, callbacks=[stops])
    assert (result.ended, result.version) == ("stopped by StopsAtOne", 2)
    assert stops.events == [("step", 0), ("step", 1), ("checkpoint", 2)]
    assert stops.ended == result.ended
    resumed = areal_jax.train(None, folder, resume=True)
    assert (resumed.ended, resumed.version) == ("completed", 12)
    assert resumed.metrics()["version"].tolist() == [*range(12)]
    again = areal_jax.train(None, folder, resume=True)
    assert again.version == 12 and again.metrics()["version"].tolist() == [*range(12)]
    with pytest.raises(ConfigError, match="already holds a run"):
        areal_jax.train(experiment, folder)
    with pytest.raises(ConfigError, match="expected an experiment"):
        areal_jax.train(None, tmp_path / "other")


@pytest.mark.slow
@pytest.mark.parametrize("event", ["on_step", "on_evaluation"])
def test_error_of_a_callback_is_raised_after_a_checkpoint(
    event: str, experiment: Experiment, tmp_path: Path
) -> None:
    class Fails(Recorded):
        pass

    def fail(_self: Fails, metrics: Any) -> None:
        raise LookupError(f"mine at {metrics['version']}")

    setattr(Fails, event, fail)
    fails = Fails()
    evaluated = experiment.replace(
        num_steps=50, **{"evaluation.every_steps": 1, "evaluation.num_tasks": 2}
    )
    with pytest.raises(LookupError, match="mine at 0"):
        areal_jax.train(evaluated, tmp_path / "run", callbacks=[fails])
    assert saved_versions(tmp_path / "run" / "checkpoints") == [1 if event == "on_step" else 0]
    assert fails.ended == "LookupError: mine at 0"


@pytest.mark.slow
def test_second_run_leaves_no_thread_and_no_array(experiment: Experiment, tmp_path: Path) -> None:
    def left() -> tuple[int, int, set[str]]:
        gc.collect()
        threads = threading.enumerate()
        return len(jax.live_arrays()), len(threads), {thread.name for thread in threads}

    found = []
    for number in range(2):
        areal_jax.train(experiment.replace(seed=number), tmp_path / str(number))
        found.append(left())
    assert found[1] == found[0]


@pytest.mark.slow
def test_keep_best_under_a_running_loop_is_a_run_folder_of_the_best(
    experiment: Experiment, tmp_path: Path
) -> None:
    evaluated = experiment.replace(
        num_steps=3,
        **{"evaluation.every_steps": 1, "evaluation.num_tasks": 2, "checkpoint.every_steps": 1},
    )

    async def cell() -> areal_jax.Result:
        # This metric rises with every version, so that each one replaces the one before.
        return areal_jax.train(
            evaluated.replace("checkpoint.keep=1"),
            tmp_path / "run",
            callbacks=[KeepBest("evaluation/newest_version")],
        )

    result = asyncio.run(cell())
    assert result.version == 3
    best = result.run_folder / "best"
    assert sorted(path.name for path in best.iterdir()) == [
        "checkpoints",
        "config.json",
        "score.json",
    ]
    score = json.loads((best / "score.json").read_text())
    assert score == {"version": 3, "metric": "evaluation/newest_version", "score": 3.0}
    assert saved_versions(best / "checkpoints") == [3]
    assert named_policy(str(best), "model").checkpoint == RunCheckpoint(best, None, seed=3)


def test_early_stopping_counts_values_without_improvement() -> None:
    stopping = EarlyStopping("trainer/reward", patience=2, min_improvement=0.1)
    rewards = [1.0, 1.05, 1.2, 1.25, 1.3]
    # 1.05 is within 0.1 of 1.0, 1.2 is not; neither of the next two is 0.1 above 1.2.
    found = [stopping.on_step({"version": 0, "trainer/reward": reward}) for reward in rewards]
    assert found == [None, None, None, None, STOP]
    assert stopping.on_evaluation({"version": 0, "evaluation/loss": 1.0}) is None
    falling = EarlyStopping("evaluation/loss", patience=1, mode="min")
    losses = [2.0, 1.0, 1.5]
    assert [falling.on_evaluation({"version": 0, "evaluation/loss": loss}) for loss in losses] == [
        None,
        None,
        STOP,
    ]


CTRL_C = """
import os, signal, sys
# A shell starts its background jobs with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
import areal_jax
from areal_jax.config.load import read_config
from pathlib import Path

class Interrupts(areal_jax.Callback):
    def on_step(self, metrics):
        if metrics["version"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

def script():
    areal_jax.train(read_config(Path("settings.json")), "script", callbacks=[Interrupts()])

async def cell():
    areal_jax.train(read_config(Path("settings.json")), "notebook", callbacks=[Interrupts()])

def notebook():
    import asyncio
    asyncio.new_event_loop().run_until_complete(cell())

for run in (script, notebook):
    try:
        run()
    except KeyboardInterrupt as interrupt:
        print(f"KeyboardInterrupt: {interrupt}")
"""


@pytest.mark.slow
def test_ctrl_c_in_a_script_and_in_a_notebook_ends_with_a_checkpoint(
    experiment: Experiment, of_a_command: dict[str, str], tmp_path: Path
) -> None:
    write_config(
        experiment.replace(num_steps=100_000, placement=PlacementConfig()),
        tmp_path / "settings.json",
    )
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C],
        cwd=tmp_path,
        env=of_a_command,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    interrupts = [line for line in done.stdout.splitlines() if line.startswith("KeyboardInt")]
    assert len(interrupts) == 2, done.stderr
    for run, said in zip(("script", "notebook"), interrupts, strict=True):
        (version,) = saved_versions(tmp_path / run / "checkpoints")
        assert 2 <= version < 100_000
        assert said.startswith(
            f"KeyboardInterrupt: stopped by SIGINT after {version} of 100000 steps; "
        )
        assert f"--resume={run} resumes from the checkpoint of version {version}" in said
