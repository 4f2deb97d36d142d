"""placement.rollout_share=auto, on eight simulated devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from areal_jax.config.experiment import Experiment
from areal_jax.config.load import CONFIG_FILE, load_experiment, read_config, write_config
from areal_jax.errors import ConfigError
from areal_jax.metrics import jsonl
from areal_jax.run.auto_split import NUM_STEPS, balanced, best_split, device_seconds
from areal_jax.run.make_plan import make_plan
from areal_jax.run.plan import Plan
from areal_jax.sim.measured import StageTimes

AUTO = "placement.rollout_share=auto"
SMALL = (
    AUTO,
    "tasks.num_tasks=50",
    "evaluation.every_steps=0",
    "rollout.groups_per_batch=4",
    "rollout.samples_per_group=2",
)
MANY_STEPS = (
    *SMALL,
    "policy.random_init=true",
    "engine.num_slots=6",
    "engine.max_new_tokens=256",
    "trainer.num_mini_batches=1",
)
MUCH_TO_LEARN = (
    *SMALL,
    "engine.num_slots=48",
    "engine.max_new_tokens=16",
    "trainer.num_mini_batches=4",
)


def plan(*overrides: str) -> Plan:
    return make_plan(load_experiment("aime", *overrides))


def test_device_seconds_are_those_of_full_slots() -> None:
    # 6 devices with 48 slots sample 1000 tokens in 1000 / 48 steps of 10 ms, and prefill 200 in
    # 1 ms each; 2 devices train.
    times = StageTimes(0.01, 0.001, 0.0, 0.0, train_step_s=1.5, grading_s=0.0, travel_s=0.0)
    rows = [
        {"rollout/tokens": 900.0, "rollout/prefill_tokens": 200.0},
        {"rollout/tokens": 1100.0, "rollout/prefill_tokens": 200.0},
    ]
    generate_s, train_s = device_seconds(plan(*SMALL), times, rows)
    assert generate_s == pytest.approx(6 * (1000 / 48 * 0.01 + 0.2))
    assert train_s == pytest.approx(2 * 1.5)


def test_slots_per_device_are_equal_in_all_splits(tmp_path: Path) -> None:
    # Equal times of decoding and training: half. 48 slots on 6 devices are 32 on 4.
    found = best_split(plan(*SMALL, "engine.kv_tokens=12000"), 1.0, 1.0)
    assert (found.train_mesh.size, found.rollout_mesh.size) == (4, 4)
    assert (found.experiment.engine.num_slots, found.experiment.engine.kv_tokens) == (32, 8000)
    write_config(found.experiment, tmp_path / CONFIG_FILE)
    again = read_config(tmp_path / CONFIG_FILE).placement
    assert (again.rollout_share, again.rollout_devices, again.train_devices) == (None, 4, 4)


def test_infeasible_split_falls_back_to_the_next_best() -> None:
    # 5 to 3 would be best, but engines over two devices need an even number.
    assert best_split(plan(*SMALL), 5.0, 3.0).rollout_mesh.size == 5
    assert best_split(plan(*SMALL, "placement.rollout_tensor=2"), 5.0, 3.0).rollout_mesh.size == 4
    # None of the splits has 16.
    with pytest.raises(ConfigError, match="finds no split of 8 devices; the best one"):
        best_split(
            replace(
                plan(*SMALL),
                experiment=load_experiment("aime", *SMALL, "placement.rollout_tensor=16"),
            ),
            5.0,
            3.0,
        )


@pytest.mark.slow
def test_slower_stage_gets_more_devices(tmp_path: Path) -> None:
    splits: list[int] = []
    for name, settings in {"decode": MANY_STEPS, "train": MUCH_TO_LEARN}.items():
        found = balanced(plan(*settings), tmp_path / name)
        assert isinstance(found.experiment, Experiment)
        assert found.train_mesh.size + found.rollout_mesh.size == 8
        assert len(list(jsonl.read(tmp_path / name / "metrics.jsonl"))) == NUM_STEPS
        assert not (tmp_path / name / "checkpoints").exists()
        splits.append(found.rollout_mesh.size)
    assert splits[0] > splits[1]
