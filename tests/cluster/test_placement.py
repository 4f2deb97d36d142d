"""A cluster as it is found: what is asked of it and what it has; and settings that go together."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from areal_jax.checkpoint.recovery import Columns
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.cluster.config import Ray
from areal_jax.cluster.placement import Kind, count_unplaced, require_fit
from areal_jax.config.load import load_experiment, write_config
from areal_jax.errors import ConfigError
from areal_jax.parallel.config import PlacementConfig


def test_ray_launch_plans_all_trainer_devices_and_one_engine() -> None:
    experiment = load_experiment(
        "aime", "launch=ray", "launch.trainer_hosts=2", "launch.trainer_devices=4"
    )
    assert isinstance(experiment.launch, Ray)
    planned = experiment.launch.resolve_placement(PlacementConfig(train_tensor=2))
    assert (
        planned.train_devices,
        planned.rollout_devices,
        planned.simulated_devices,
        planned.train_tensor,
    ) == (8, 1, 9, 2)


@pytest.mark.parametrize(
    ("setting", "reported"),
    [
        ("placement.train_devices=2", "launch.trainer_hosts and launch.trainer_devices"),
        ("placement.rollout_devices=2", "launch.rollout_engines and launch.engine_devices"),
        ("placement.rollout_share=0.5", "launch.rollout_engines and launch.engine_devices"),
        ("placement.simulated_devices=2", "launch.accelerator=none"),
        ("placement.engines=2", "launch.rollout_engines"),
    ],
)
def test_device_counts_have_one_setting(setting: str, reported: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{re.escape(setting)} has no effect under launch=Ray.*{reported}"
    ):
        load_experiment("aime", "launch=ray", setting)


def test_fine_tuning_refuses_a_cluster() -> None:
    with pytest.raises(ConfigError, match="launch=Ray is for reinforcement learning"):
        load_experiment("sft", "launch=ray")


def test_own_cluster_requires_a_token_and_others_keep_theirs() -> None:
    mine = Ray().environment_variables({})
    assert mine["RAY_AUTH_MODE"] == "token" and len(mine["RAY_AUTH_TOKEN"]) == 64
    assert Ray().environment_variables({})["RAY_AUTH_TOKEN"] != mine["RAY_AUTH_TOKEN"]
    assert "RAY_AUTH_TOKEN" not in Ray(address="there:6379").environment_variables({})
    assert "RAY_AUTH_TOKEN" not in Ray().environment_variables({"RAY_ADDRESS": "there:6379"})


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        (
            ["launch.trainer_hosts=2", "launch.accelerator=GPU", "launch.trainer_devices=4"],
            r"for 2 trainer hosts, 2 engines, 1 reward worker: expected 10 GPU, found 0; lower",
        ),
        (
            ["launch.address=127.0.0.1:1"],
            r"launch.address=127.0.0.1:1: no Ray cluster answers there",
        ),
    ],
)
@pytest.mark.slow
def test_missing_cluster_resources_are_refused_with_numbers(
    settings: list[str], reported: str, tmp_path: Path, of_a_command: dict[str, str]
) -> None:
    command = [
        sys.executable,
        "-m",
        "areal_jax.train",
        "--exp=aime",
        f"--run-folder={tmp_path / 'run'}",
        "launch=ray",
    ]
    done = subprocess.run(
        [*command, *settings], capture_output=True, text=True, timeout=120, env=of_a_command
    )
    assert done.returncode == 2, done.stderr
    assert re.search(reported, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_worker_death_at_start_ends_the_run_with_one_line(
    tmp_path: Path, of_a_command: dict[str, str]
) -> None:
    # The file of the experiment is imported by the command and by every worker.
    own, run = tmp_path / "own.py", tmp_path / "run"
    own.write_text(
        "import os, sys\nfrom areal_jax.config.load import load_experiment\nif "
        "sys.argv[0].endswith('default_worker.py'): os._exit(3)\nexperiment = "
        "load_experiment('aime', 'launch=ray', 'launch.attempts=0')\n"
    )
    run.mkdir()
    write_config(load_experiment(str(own)), run / "config.json")
    store = CheckpointStore(run / "checkpoints", keep=1)
    store.save(7, {"params": {"embedding": np.zeros((2, 3), np.float32)}}, Columns({}, {}))
    store.close()
    command = [sys.executable, "-m", "areal_jax.train", f"--exp={own}", f"--resume={run}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=of_a_command)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("areal_jax: ")]
    resumed = f"areal-train --resume={run} resumes from the checkpoint of version 7"
    reported = r"(trainer host|engine|reward worker) \d ended before it was ready: .+"
    assert re.fullmatch(rf"areal_jax: {reported}; \S*{re.escape(resumed)}", line), line


def test_every_process_must_fit_on_one_node() -> None:
    nodes = [{"CPU": 8.0, "memory": 1.0}, {"CPU": 8.0, "GPU": 8.0}, {"CPU": 8.0, "GPU": 8.0}]
    # Three times 4 GPUs leave 4 of one node for 4 engines; reward workers need none.
    engines = {"CPU": 1.0, "GPU": 1.0}
    wanted: dict[Kind, tuple[int, dict[str, float]]] = {
        "reward worker": (8, {"CPU": 1.0}),
        "engine": (4, engines),
        "trainer host": (3, {"CPU": 1.0, "GPU": 4.0}),
    }
    assert count_unplaced(wanted, nodes) == {}
    wanted["engine"] = (6, engines)
    assert count_unplaced(wanted, nodes) == {"engine": 2}
    # 16 GPUs in all, yet no node has 9.
    assert count_unplaced({"trainer host": (1, {"CPU": 1.0, "GPU": 9.0})}, nodes) == {
        "trainer host": 1
    }
    # 24 CPUs are 8 times 3, but each node has room for two.
    assert count_unplaced({"engine": (8, {"CPU": 3.0})}, nodes) == {"engine": 2}
    # Ten times a tenth is one.
    assert count_unplaced({"reward worker": (10, {"CPU": 0.1})}, [{"CPU": 1.0}]) == {}


def test_too_small_nodes_are_refused_with_their_resources() -> None:
    nodes = [{"CPU": 2.0, "GPU": 2.0}] * 3 + [{"CPU": 4.0}]
    config = Ray(trainer_devices=4, rollout_engines=2)
    with pytest.raises(ConfigError) as caught:
        require_fit(config, "GPU", nodes)
    assert (
        "too small for 1 trainer host, 2 engines, 1 reward worker: expected one node for each "
        "(trainer host 1 CPU and 4 GPU, engine 1 CPU and 1 GPU, reward worker 1 CPU), found nodes "
        "of 2 CPU and 2 GPU (3 times), 4 CPU without resources for 1 of 1 trainer host; lower "
        "launch.trainer_hosts"
    ) in str(caught.value)
    require_fit(config, "none", nodes)


def test_tpu_chips_that_ray_cannot_give_to_a_process_are_refused() -> None:
    nodes = [{"CPU": 99.0, "TPU": 8.0}]
    require_fit(Ray(trainer_devices=4, rollout_engines=2, engine_devices=2), "TPU", nodes)
    with pytest.raises(ConfigError, match=r"1, 2, 4, 8 TPU chips .* launch.engine_devices=3"):
        require_fit(Ray(trainer_devices=4, rollout_engines=1, engine_devices=3), "TPU", nodes)
