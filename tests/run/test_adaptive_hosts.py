"""placement.adaptive under launch=Ray: trainer hosts become engines and engines trainer hosts."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import chz
import numpy as np
import pytest
from cluster_runs import find_faults, kill, small_run, tiny_run
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from safetensors.numpy import load_file

from areal_jax import loop
from areal_jax.cluster.config import Local, Ray
from areal_jax.cluster.connection import Connection
from areal_jax.cluster.trainers import Trainers
from areal_jax.config.experiment import Experiment
from areal_jax.errors import ConfigError
from areal_jax.metrics import jsonl
from areal_jax.parallel.config import PlacementConfig
from areal_jax.run.adaptive_hosts import AdaptiveHosts
from areal_jax.run.build import Run
from areal_jax.run.cluster import train_on_cluster
from areal_jax.run.make_plan import make_plan
from areal_jax.run.plan import possible_splits
from areal_jax.run.start import start
from areal_jax.run.worker_pool import choose_leaving
from areal_jax.sim.split_choice import Move, SplitChooser

Save = Callable[[], Awaitable[None]]
Adapt = Callable[[Run[Trainers], AdaptiveHosts, Save], Awaitable[None]]
"""What a test does after a step."""


@pytest.mark.parametrize(
    ("config", "splits"),
    [
        # (trainer hosts, engines): two nodes of eight, of which a host has half of one.
        (Ray(trainer_hosts=2, trainer_devices=4, rollout_engines=8), [(3, 4), (2, 8), (1, 12)]),
        (Ray(trainer_hosts=2, rollout_engines=1), [(2, 1), (1, 2)]),
        # Engines of two devices, of which one always stays.
        (
            Ray(trainer_hosts=1, trainer_devices=4, rollout_engines=5, engine_devices=2),
            [(3, 1), (2, 3), (1, 5)],
        ),
        (Ray(trainer_hosts=3, rollout_engines=2, max_engines=3), [(4, 1), (3, 2), (2, 3)]),
        (Ray(trainer_hosts=1, trainer_devices=4, rollout_engines=4), [(1, 4)]),
    ],
)
def test_splits_keep_all_devices_a_host_and_an_engine(
    config: Ray, splits: list[tuple[int, int]]
) -> None:
    found = [config.at_split(rollout) for rollout in config.possible_splits()]
    assert [(each.trainer_hosts, each.rollout_engines) for each in found] == splits
    assert {each.num_devices for each in found} == {config.num_devices}


def test_single_split_is_refused_with_its_settings() -> None:
    settings = "placement.adaptive=true", "launch.trainer_hosts=1"
    with pytest.raises(ConfigError, match=r"leave one split only; set launch\.trainer_hosts to at"):
        make_plan(small_run(*settings, "launch.rollout_engines=1"))
    plan = make_plan(small_run(*settings))
    assert list(possible_splits(plan)) == [1, 2]


def test_engines_that_leave_free_whole_hosts_on_one_node() -> None:
    engines = [(7, "b"), (1, "a"), (2, "b"), (3, "b"), (4, "a"), (5, "c"), (6, "b")]
    assert choose_leaving(engines, 1, 2) == [1, 4]
    assert choose_leaving(engines, 3, 2) == [1, 4, 7, 2, 3, 6]
    assert choose_leaving(engines, 1, 1) == [5]
    assert choose_leaving(engines, 0, 2) == []
    with pytest.raises(ConfigError, match=r"a node with 2 engines.* found nodes with 0, 0, 1"):
        choose_leaving(engines, 4, 2)


def rows(folder: Path, name: str) -> list[float]:
    return [row[name] for row in jsonl.read(folder / "metrics.jsonl") if name in row]


def adaptive_run(folder: Path, *settings: str) -> Experiment:
    return tiny_run(
        folder,
        "placement.adaptive=true",
        "launch.rollout_engines=1",
        "launch.reward_workers=1",
        *settings,
    )


def train(experiment: Experiment, folder: Path, adapt: Adapt) -> None:
    """Train; `adapt` replaces `AdaptiveHosts.adapt`."""

    async def go(run: Run[Trainers]) -> None:
        hosts = run.hosts
        assert isinstance(hosts, AdaptiveHosts)

        async def adapt_here(save: Save) -> None:
            await adapt(run, hosts, save)

        hosts.adapt = adapt_here
        assert isinstance(run.experiment, Experiment)
        await loop.train(run, experiment)

    # Workers read settings with staleness, which moves require; the loop may have none.
    written = chz.replace(experiment, rollout=chz.replace(experiment.rollout, max_staleness=2))
    asyncio.run(train_on_cluster(make_plan(written), folder, go, resume=False, source="aime"))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.ray_run
def test_moves_change_no_sample_and_no_parameter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor do refused ones: an impossible one, and one whose devices another user has taken."""
    settings = "num_steps=6", "checkpoint.export_hf=true", "engine.max_new_tokens=16"
    experiment = adaptive_run(tmp_path, *settings)
    experiment = chz.replace(experiment, rollout=chz.replace(experiment.rollout, max_staleness=0))
    moves, moved = {2: 2, 4: 1}, tmp_path / "moved"

    def policy(folder: Path) -> dict[str, np.ndarray]:
        return load_file(folder / "policy" / "model.safetensors")

    async def ask_impossible(hosts: AdaptiveHosts, save: Save) -> None:
        """With parameters cut over both hosts, one host alone is no split."""
        plan = hosts._plan
        placement = chz.replace(plan.experiment.placement, train_fsdp=2)
        hosts._plan = replace(plan, experiment=chz.replace(plan.experiment, placement=placement))
        await hosts.move(2, save, "")
        hosts._plan = plan

    async def ask_without_resources(run: Run[Trainers], hosts: AdaptiveHosts, save: Save) -> None:
        """Another user of the cluster takes what an engine and a trainer host free."""
        pool, own, others = hosts._pool, hosts._start_hosts, list[PlacementGroup]()

        async def start_late(version: int) -> list[Connection]:
            if others:
                remove_placement_group(others[0])
            else:
                others.append(placement_group([{"CPU": 2.0}]))
                assert await asyncio.to_thread(others[0].wait, 60)
                config = hosts._cluster.config
                hosts._cluster.config = chz.replace(config, start_timeout_s=2.0)
            return await own(version)

        hosts._start_hosts = start_late
        await hosts.move(1, save, "")
        hosts._start_hosts = own
        assert len(run.trainer.connections) == 1 and len(pool.engines.connections) == 1
        await until(lambda: hosts.is_ready)
        assert hosts.rollout_devices == 2 and 1 not in hosts._meter.chooser.splits

    async def adapt(run: Run[Trainers], hosts: AdaptiveHosts, save: Save) -> None:
        version = run.trainer.version
        if version == 1:
            await ask_impossible(hosts, save)
        if version == 3:
            await ask_without_resources(run, hosts, save)
        if version not in moves:
            return
        await asyncio.to_thread(run.trainer.write_results, version)
        before = policy(moved)
        shutil.rmtree(moved / "policy")
        await hosts.move(moves[version], save, "")
        await asyncio.to_thread(run.trainer.write_results, version)
        for name, array in policy(moved).items():
            np.testing.assert_array_equal(array, before[name])
        # Engines that join get the version, too.
        engines = hosts._pool.engines._engines
        await until(
            lambda: hosts.is_ready and all(engine.version == version for engine in engines.values())
        )

    train(experiment, moved, adapt)
    shown = capsys.readouterr().out
    assert "2 rollout devices are impossible: 1 train devices are not divisible by" in shown
    assert "1 rollout devices are impossible: expected a node with 1 CPU free for trainer" in shown
    # One that gives way to the split before has stopped training, too.
    assert rows(moved, "rollout/split_moves") == [0.0, 0.0, 1.0, 2.0, 3.0, 3.0]
    assert all(stall_s > 0 for stall_s in rows(moved, "rollout/split_stall_s")[2:])

    # The same training on two devices of this process.
    here = PlacementConfig(train_devices=2, rollout_devices=1)
    still = tmp_path / "still"
    start(make_plan(chz.replace(experiment, launch=Local(), placement=here)), still, resume=False)

    def trained(folder: Path) -> list[tuple[object, ...]]:
        names = "version", "group", "number", "task", "tokens", "versions"
        return [tuple(row[name] for name in names) for row in jsonl.read(folder / "samples.jsonl")]

    assert trained(moved) == trained(still)
    for name in ("loss", "grad_norm", "reward", "ratio"):
        found = [rows(folder, f"trainer/{name}") for folder in (moved, still)]
        assert any(found[0])
        np.testing.assert_allclose(*found, rtol=1e-3, atol=1e-5)
    for name, array in policy(still).items():
        np.testing.assert_allclose(policy(moved)[name], array, rtol=1e-2, atol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.ray_run
def test_moves_and_a_death_in_one_keep_all_laws(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A trainer host dies in the move to two engines, one of which leaves in another move."""
    experiment = adaptive_run(
        tmp_path,
        *("num_steps=7", "checkpoint.every_steps=4", "engine.max_new_tokens=800"),
        # One length of the view, and with it one program to decode.
        "engine.batch_invariant=full",
    )
    costs_s, killed, continued = list[float](), list[str](), list[int]()

    def choose(self: SplitChooser, steps_left: int, cost_s: Callable[[int], float]) -> Move | None:
        costs_s.append(cost_s(3 - self.rollout))
        return Move(3 - self.rollout, 2.0, 1.0, 8.0, 4.0)

    monkeypatch.setattr(SplitChooser, "choose", choose)
    own = AdaptiveHosts.adapt

    async def adapt(run: Run[Trainers], hosts: AdaptiveHosts, save: Save) -> None:
        version, engines, start = run.trainer.version, hosts._pool.engines, hosts._start_hosts

        async def start_and_kill(version: int) -> list[Connection]:
            connections = await start(version)
            killed.append(kill(connections[0]))
            return connections

        if version == 2:
            assert not killed, "the checkpoint of the move is that of the restart"
            hosts._start_hosts = start_and_kill
            await own(hosts, save)
        if version == 5:
            # With the split that the run moved to, not that of the settings.
            assert (len(run.trainer.connections), hosts.rollout_devices) == (1, 2)
            await until(
                lambda: (
                    hosts.is_ready
                    and {job.number for job in engines._jobs.values()} >= set(engines.staying)
                )
            )
            tokens, answered = engines.num_tokens, engines.num_answered
            await own(hosts, save)
            assert len(run.trainer.connections) == 2 and len(engines.connections) == 1
            assert engines.num_tokens > tokens or engines.num_answered > answered
            continued.append(engines.num_moved)

    with caplog.at_level(logging.WARNING):
        train(experiment, tmp_path / "run", adapt)
    assert killed == ["trainer host 0"] and continued[0] > 0
    # The start of the first trainer hosts takes seconds.
    assert len(costs_s) == 2 and min(costs_s) > 1.0
    assert find_faults(tmp_path / "run", num_steps=7) == []
    shown = capsys.readouterr().out
    assert "resuming from the checkpoint of version 2" in shown
    assert (
        "2 -> 1 engines, 1 -> 2 trainer hosts, before step 5; a batch takes 8 device-seconds to"
        in shown
    )
    assert any("the run resumes from its last checkpoint" in each for each in caplog.messages)
    engines = rows(tmp_path / "run", "rollout/engines")
    assert engines == [1.0, 1.0, 2.0, 2.0, 2.0, 1.0, 1.0]
