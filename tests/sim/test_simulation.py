from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from areal_jax.models.known import known_shape
from areal_jax.rollout.gate import Gate
from areal_jax.sim.costs import (
    Efficiency,
    EngineCosts,
    EvenSplit,
    PackedSchedule,
    Rewards,
    TrainerCosts,
)
from areal_jax.sim.engine import EngineBehavior
from areal_jax.sim.hardware import DEVICES
from areal_jax.sim.lengths import LogNormal, Recorded, capped_mean
from areal_jax.sim.simulation import Barrier, Failures, SimulatedCluster, Staged, Workload, simulate

MODEL, DEVICE = known_shape("qwen2.5-1.5b"), DEVICES["H100"]
CLUSTER = SimulatedCluster(MODEL, DEVICE, rollout_devices=3, train_devices=1)
LONG_TAILED = LogNormal(1000.0, 1.0)
WORKLOAD = Workload(
    LONG_TAILED, 8000, groups_per_batch=8, samples_per_group=4, max_running_groups=16
)


def test_without_staleness_a_step_is_the_sum_of_its_stages() -> None:
    # One engine, equal answers: prefill, 500 decode steps of all 8, one round of grading, training;
    # then weights travel and the next batch begins.
    cluster = replace(
        CLUSTER, rollout_devices=1, train_devices=2, rewards=Rewards(num_workers=8, grading_s=0.25)
    )
    workload = Workload(
        Recorded((500,)),
        8000,
        prompt_tokens=100,
        groups_per_batch=2,
        samples_per_group=4,
        max_staleness=0,
        num_mini_batches=1,
    )
    engine, trainer = EngineCosts(MODEL, DEVICE), TrainerCosts(MODEL, DEVICE, 2, num_mini_batches=1)
    step = engine.step(8)
    decode_s = 500 * (step.fixed_s + step.context_s * 8 * 100) + step.context_s * 8 * 500**2 / 2
    train_s = trainer.train_s(np.full(8, 600.0))
    (travel_s,) = cluster.arrivals_s()
    assert travel_s == pytest.approx(0.5 + engine.weight_bytes / (0.7 * 50e9))
    expected = (
        travel_s + engine.copy_s + 2 * engine.prefill_s(100.0, 5000.0) + decode_s + 0.25 + train_s
    )
    outcome = simulate(cluster, workload, num_steps=5)
    assert outcome.step_s == pytest.approx(expected, rel=1e-4)
    assert outcome.tokens_per_s == pytest.approx(4000 / expected, rel=1e-4)
    assert outcome.staleness == outcome.masked == 0


def test_async_steps_take_the_slower_stage_and_beat_synchronous() -> None:
    steps = {
        eta: simulate(CLUSTER, replace(WORKLOAD, max_staleness=eta), num_steps=6)
        for eta in (0, 1, 4)
    }
    assert steps[4].tokens_per_s > steps[1].tokens_per_s > 1.2 * steps[0].tokens_per_s
    assert all(outcome.step_s >= outcome.train_s for outcome in steps.values())
    # Around 1: some groups overtake others.
    assert 0.5 < steps[1].staleness < 1.5


def test_the_same_seed_gives_the_same_outcome() -> None:
    cluster = replace(CLUSTER, failures=Failures(60.0, repair_s=20.0))
    first, second, other = (
        simulate(cluster, WORKLOAD, num_steps=4, seed=seed) for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other


@pytest.mark.parametrize("eta", [0, 2])
def test_the_gate_bound_holds_while_engines_fail(eta: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    start = Gate.start

    def checked(gate: Gate, kind: str | None = None) -> int:
        oldest = start(gate, kind)
        seen.append((gate.version + eta + 1) * gate.groups_per_batch - gate.accepted - gate.running)
        return oldest

    monkeypatch.setattr(Gate, "start", checked)
    cluster = replace(CLUSTER, failures=Failures(10.0, repair_s=8.0))
    outcome = simulate(cluster, replace(WORKLOAD, max_staleness=eta), num_steps=6)
    assert outcome.counts["failures"] >= 5
    assert min(seen) == 0
    assert outcome.counts["started"] == outcome.counts["running"] + outcome.counts["accepted"]
    assert outcome.counts["accepted"] == 6 * 8 + outcome.counts["buffered"]
    assert (outcome.staleness, outcome.masked) == (0, 0) if eta == 0 else outcome.staleness > 0


def test_failed_engines_cost_their_share_and_little_more() -> None:
    # Each is down 20 of 80 s on average: a quarter, by chance more or less.
    whole = simulate(CLUSTER, WORKLOAD, num_steps=10)
    broken = simulate(
        replace(CLUSTER, failures=Failures(60.0, repair_s=20.0)), WORKLOAD, num_steps=10
    )
    down = broken.shares["down"]
    assert 0.1 < down < 0.4
    assert 1 - 2 * down < broken.tokens_per_s / whole.tokens_per_s < 1


def test_kept_caches_and_stall_free_transfers_save_time() -> None:
    kept = EngineBehavior(on_update="keep")
    by_name = {
        "paper": replace(CLUSTER, transfer=Barrier()),
        "rolling": replace(CLUSTER, transfer=Staged()),
        "rolling, kept": replace(CLUSTER, transfer=Staged(), behavior=kept),
    }
    found = {name: simulate(cluster, WORKLOAD, num_steps=6) for name, cluster in by_name.items()}
    assert (
        found["paper"].tokens_per_s
        < found["rolling"].tokens_per_s
        < found["rolling, kept"].tokens_per_s
    )
    assert found["paper"].shares["transfer"] > 0.05
    assert (
        found["rolling"].shares["recompute"]
        > 0
        == found["rolling, kept"].shares.get("recompute", 0)
    )


def test_more_train_devices_shorten_the_step_until_its_fixed_part() -> None:
    lengths = np.full(8192, 2000.0)
    few, more, many = (
        TrainerCosts(MODEL, DEVICE, num).train_s(lengths) - 2.0 for num in (8, 16, 80_000)
    )
    assert few == pytest.approx(2 * more, rel=0.01)
    assert 0 < many < 0.1
    assert (
        TrainerCosts(MODEL, DEVICE, 8).fits
        and not TrainerCosts(known_shape("qwen2.5-32b"), DEVICE, 8).fits
    )


def test_a_pipeline_costs_fill_drain_and_its_fullest_stage() -> None:
    # Equal sequences of 1024: what a micro-batch of 4096 takes on a stage is known. An untied
    # embedding is in the first of 4 stages and multiplies nothing: the others do (N / (N -
    # embedding)) times their share.
    model, lengths = known_shape("r1-distill-qwen-7b"), np.full(4096, 1024.0)
    efficiency = Efficiency(update_s=0.0)
    fuller = model.num_params / (model.num_params - model.vocab_size * model.hidden_size)
    assert fuller == pytest.approx(1.077, abs=0.001)
    micro_batch = 2 * model.matmul_params * 4096 + 2 * model.attention_width * 4096 * 1024
    stage_s = fuller * micro_batch / (4 * DEVICE.flops_per_s * efficiency.train_flops)
    found = []
    for num_devices in (8, 64):
        flat = TrainerCosts(model, DEVICE, num_devices, efficiency).train_s(lengths)
        cut = TrainerCosts(
            model, DEVICE, num_devices, efficiency, layout=PackedSchedule(4, 1, 4096)
        ).train_s(lengths)
        reduce_s = 0.0 if num_devices == 8 else 4 * 4 * model.num_params / 8 / (0.7 * 50e9)
        found.append(cut - reduce_s - fuller * (flat - reduce_s))
    # Three micro-batches of waiting for each of 4 updates, worth three forward passes, and for the
    # one pass beside them.
    assert found == pytest.approx([3 * (3 * 4 + 1) * stage_s] * 2)


def test_devices_with_whole_sequences_wait_for_the_slowest() -> None:
    # Two mini-batches for two devices with a sequence each: of 3000 and 1000 tokens, then of 2000
    # and 2000.
    efficiency = Efficiency(update_s=0.0)
    lengths = np.array([3000.0, 1000.0, 2000.0, 2000.0])

    def alone_s(tokens: float) -> float:
        flops = 2 * MODEL.matmul_params * tokens + 2 * MODEL.attention_width * tokens**2
        return flops / (DEVICE.flops_per_s * efficiency.train_flops)

    passes_s = sum(map(alone_s, lengths)) / 2
    dealt = TrainerCosts(MODEL, DEVICE, 2, efficiency, num_mini_batches=2, layout=EvenSplit())
    assert dealt.train_s(lengths) == pytest.approx(
        3 * (alone_s(3000.0) + alone_s(2000.0)) + passes_s
    )


def test_async_hides_the_delay_of_weight_notices() -> None:
    quick = replace(CLUSTER, transfer=Barrier())
    late = replace(CLUSTER, transfer=Barrier(notice_s=10.0))
    turns, ahead = (
        [
            simulate(cluster, replace(WORKLOAD, max_staleness=eta), num_steps=6).step_s
            for cluster in (quick, late)
        ]
        for eta in (0, 4)
    )
    assert turns[1] == pytest.approx(turns[0] + 10.0, abs=0.1)
    assert ahead[1] < ahead[0] + 1.0


def test_capped_mean_equals_the_mean_of_samples() -> None:
    import random

    chance = random.Random(0)
    sampled = [min(length, 4000) for length in LONG_TAILED.sample_lengths(chance, 100_000)]
    assert capped_mean(LONG_TAILED, 4000) == pytest.approx(sum(sampled) / len(sampled), rel=0.01)
    assert capped_mean(LogNormal(7.0, 0.0), 5) == 5
