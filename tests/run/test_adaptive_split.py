"""placement.adaptive: devices move while a run runs, and nothing but their number shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import chz
import jax
import numpy as np
import pytest
from run_laws import broken_laws
from tiny_runs import tiny_experiment, write_tiny_policy

from areal_jax import loop
from areal_jax.checkpoint.config import CheckpointConfig
from areal_jax.config.experiment import Experiment
from areal_jax.config.load import load_experiment
from areal_jax.errors import ConfigError
from areal_jax.metrics import jsonl
from areal_jax.models.config import LoRA
from areal_jax.parallel.config import PlacementConfig
from areal_jax.records import RewardResult, Task
from areal_jax.rl.config import GAE, PPO, Reference
from areal_jax.run.build import build_run
from areal_jax.run.make_plan import make_plan
from areal_jax.run.plan import possible_splits
from areal_jax.run.trainer import rl_trainer
from areal_jax.sim.split_choice import Move, SplitChooser

# Two engines of two devices; with moves there may be one to three.
HALF = PlacementConfig(train_devices=4, rollout_devices=4, engines=2, adaptive=True)


async def grade_by_parity(task: Task, answer: str) -> RewardResult:
    return RewardResult("wrong" if len(answer) % 2 else "correct")


def experiment(folder: Path, *, num_steps: int, max_staleness: int) -> Experiment:
    tiny = tiny_experiment(write_tiny_policy(folder), num_steps=num_steps)
    return chz.replace(
        tiny,
        placement=HALF,
        rollout=chz.replace(tiny.rollout, max_staleness=max_staleness),
        engine=chz.replace(tiny.engine, max_new_tokens=16, prefill_chunk_tokens=32),
    )


def train(
    exp: Experiment, folder: Path, moves: Mapping[int, int] | None = None, *, resume: bool = False
) -> tuple[list[np.ndarray], dict[str, float]]:
    """Train, with moves to numbers of rollout devices by version (None: as the run chooses, which
    waits for the compiler after each step); the parameters and counters.
    """

    async def go() -> tuple[list[np.ndarray], dict[str, float]]:
        plan = make_plan(exp)
        async with build_run(plan, folder, resume=resume, make_trainer=rl_trainer) as run:
            run.grader = run.evaluation.grader = grade_by_parity
            split = run.split
            assert split is not None

            choose = split.adapt

            async def adapt() -> None:
                if moves is None:
                    await choose()
                    if split._compiling is not None:
                        await asyncio.wait([split._compiling])
                elif (rollout := moves.get(run.trainer.version)) is not None:
                    await split.move(rollout, "")

            for rollout in {*(moves or {}).values()} - {split.rollout_devices}:
                await split.compile(rollout)

            split.adapt = adapt
            await loop.train(run, exp)
            return [np.asarray(leaf) for leaf in jax.tree.leaves(run.trainer.params)], {
                **split.counters(),
                "train_devices": float(
                    len(jax.tree.leaves(run.trainer.params)[0].sharding.device_set)
                ),
            }

    return asyncio.run(go())


def rows(folder: Path, name: str) -> list[float]:
    return [row[name] for row in jsonl.read(folder / "metrics.jsonl") if name in row]


def trained(folder: Path) -> list[tuple]:
    return [
        (row["version"], row["group"], row["number"], row["task"], row["tokens"], row["versions"])
        for row in jsonl.read(folder / "samples.jsonl")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "moves", "engines"),
    [
        # To three engines after the second step, and back after the fifth.
        (None, {2: 6, 5: 4}, [2.0, 3.0, 3.0, 3.0, 2.0, 2.0]),
        # To one in between.
        (LoRA(rank=2), {2: 6, 4: 2, 5: 4}, [2.0, 3.0, 3.0, 1.0, 2.0, 2.0]),
    ],
    ids=["policy, critic and reference", "adapter and reference"],
)
def test_moves_change_no_sample_and_no_loss(
    tmp_path: Path, adapter: LoRA | None, moves: dict[int, int], engines: list[float]
) -> None:
    exp = experiment(tmp_path / "tiny", num_steps=6, max_staleness=0)
    trainer, trains_critic = exp.trainer, adapter is None
    if trains_critic:
        trainer = chz.replace(trainer, loss=PPO(), advantages=GAE())
    trainer = chz.replace(trainer, reference=Reference())
    exp = chz.replace(exp, trainer=trainer, policy=chz.replace(exp.policy, lora=adapter))
    params, still = train(exp, tmp_path / "still", {})
    moved_params, moved = train(exp, tmp_path / "moved", moves)
    assert (still["split_moves"], still["train_devices"]) == (0.0, 4.0)
    assert (moved["split_moves"], moved["train_devices"]) == (len(moves), 4.0)
    assert rows(tmp_path / "moved", "rollout/engines") == engines
    assert trained(tmp_path / "moved") == trained(tmp_path / "still")
    names = ["trainer/loss", "trainer/grad_norm", "trainer/reward", "trainer/ratio"]
    names += ["trainer/kl_reference"]
    names += ["trainer/value_loss"] if trains_critic else []
    for name in names:
        np.testing.assert_allclose(
            rows(tmp_path / "moved", name), rows(tmp_path / "still", name), rtol=1e-3, atol=1e-5
        )
    for ours, theirs in zip(moved_params, params, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-2, atol=1e-4)


@pytest.mark.slow
def test_asynchronous_moves_keep_all_laws_and_checkpoints(tmp_path: Path) -> None:
    exp = experiment(tmp_path / "tiny", num_steps=10, max_staleness=2)
    exp = chz.replace(
        exp,
        checkpoint=CheckpointConfig(every_steps=4),
        engine=chz.replace(exp.engine, max_new_tokens=128),
    )
    # Answers of 128 tokens are being generated whenever devices move.
    _, counters = train(chz.replace(exp, num_steps=6), tmp_path / "run", {2: 2, 4: 6})
    assert counters["split_moves"] == 2 and counters["requests_moved"] > 0
    # The checkpoint of two train devices continues with four, which then become six.
    train(exp, tmp_path / "run", {7: 2}, resume=True)
    assert broken_laws(tmp_path / "run", num_steps=10, groups=2, samples=4, max_staleness=2) == []


@pytest.mark.slow
@pytest.mark.parametrize(("train_fsdp", "num_moves"), [(None, 1.0), (4, 0.0)])
def test_chosen_split_is_compiled_beside_training_or_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    train_fsdp: int | None,
    num_moves: float,
) -> None:
    def choose(self: SplitChooser, steps_left: int, cost_s: object) -> Move | None:
        return Move(6, 2.0, 1.0, 8.0, 4.0) if self.rollout == 4 and 6 in self.splits else None

    monkeypatch.setattr(SplitChooser, "choose", choose)
    exp = experiment(tmp_path / "tiny", num_steps=4, max_staleness=2)
    exp = chz.replace(exp, placement=chz.replace(HALF, train_fsdp=train_fsdp))
    _, counters = train(exp, tmp_path / "run")
    assert counters["split_moves"] == num_moves
    assert rows(tmp_path / "run", "rollout/split_moves") == [0.0, *3 * [num_moves]]
    assert broken_laws(tmp_path / "run", num_steps=4, groups=2, samples=4, max_staleness=2) == []
    shown = capsys.readouterr().out
    if num_moves:
        assert "4 -> 6 of 8 devices decode, before step 2; a batch takes 8 device-seconds" in shown
    else:
        # Two train devices are not divisible by four shards of parameters.
        assert "6 rollout devices are impossible: 2 train devices are not divisible by" in shown
        assert shown.count("are impossible") == 1


def test_splits_are_those_of_whole_engines(tmp_path: Path) -> None:
    exp = experiment(tmp_path / "tiny", num_steps=1, max_staleness=2)
    assert list(possible_splits(make_plan(exp))) == [2, 4, 6]
    whole = chz.replace(exp, placement=chz.replace(HALF, engines=1))
    with pytest.raises(ConfigError, match=r"engines of 4 of 8 devices leave one split only"):
        make_plan(whole)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (
            ("launch=ray", "launch.trainer_hosts=2", "launch.engine_devices=2"),
            "launch.trainer_devices=1 is not divisible by launch.engine_devices=2",
        ),
        (("rollout.max_staleness=0",), "training and decoding take turns"),
    ],
)
def test_unsupported_settings_are_refused(settings: tuple[str, ...], refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        load_experiment("aime", "placement.adaptive=true", *settings)
