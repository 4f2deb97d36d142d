from __future__ import annotations

import chz
import pytest

from areal_jax.errors import ConfigError
from areal_jax.models.known import known_shape
from areal_jax.sim.config import ClusterQuestion
from areal_jax.sim.costs import EngineCosts
from areal_jax.sim.hardware import DEVICES
from areal_jax.sim.planner import engine_size, plan_cluster, rank_splits, trainer_size


def ask(**settings: object) -> ClusterQuestion:
    defaults = {"model": "qwen2.5-7b", "devices": 64, "context": 16384}
    return ClusterQuestion(**{**defaults, **settings})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        # 32.8 B parameters in 16-bit on 0.9 · 2 · 80 GB.
        (
            {"model": "qwen2.5-32b", "device": "TPU v5e", "devices_per_engine": 2},
            r"2 x TPU v5e \(32 GB\).*65\.5 GB, the KV cache holds 0",
        ),
        (
            {"model": "qwen3-30b-a3b", "device": "TPU v5e", "devices_per_engine": 16},
            "at most 8 devices",
        ),
        ({"rollout_devices": 80}, "rollout_devices=80 of devices=64"),
        ({"rollout_devices": 64}, "rollout_devices=64 of devices=64: .* some for training"),
        (
            {"rollout_devices": 9, "devices_per_engine": 2},
            "rollout_devices=9 does not divide into engines of 2",
        ),
        # 16 · 7.6 GB = 122 GB in 0.65 · 80 GB each: 3 train.
        (
            {"devices": 3},
            "devices=3 are too few .* 1 rollout devices and at least 3 x H100 for 122 GB",
        ),
        (
            {"context": 100_000},
            "context=100000 is longer than the 32768 positions of model=qwen2.5-7b",
        ),
        (
            {"context": 150},
            "expected context to be above prompt_tokens=200, found context=150",
        ),
        ({"device": "abacus"}, "expected a device of A100, H100.*, found 'abacus'"),
        ({"devices": 0, "train_share": 1.5}, "found devices=0, train_share=1.5"),
    ],
)
def test_impossible_clusters_are_refused_with_the_numbers(
    settings: dict[str, object], numbers: str
) -> None:
    question = ask(**settings)
    with pytest.raises(ConfigError, match=numbers):
        plan_cluster(question, known_shape(question.model))


def test_an_engine_holds_at_least_eight_longest_sequences() -> None:
    # 7B: 0.9 · 80 GB less 15.2 GB hold 990 000 tokens of 57 kB. 32B: 65.5 GB of weights leave 25
    # 000 on one device, and with two 298 000 tokens of 262 kB.
    assert engine_size(ask(), known_shape("qwen2.5-7b")) == 1
    large = known_shape("qwen2.5-32b")
    assert EngineCosts(large, DEVICES["H100"], 2).kv_tokens == pytest.approx(298_000, rel=0.01)
    assert engine_size(ask(model="qwen2.5-32b"), large) == 2
    assert trainer_size(large, DEVICES["H100"]) == 11  # 524 GB in 52 GB each


def test_the_split_follows_the_stages_times() -> None:
    # Twice as much to generate as to train: two thirds. The slower side then takes 200 / 64 s; a
    # device less makes 200 / 63, a device more 100 / 31.
    assert rank_splits(96, 200.0, 100.0)[:2] == [64, 63]
    assert rank_splits(4, 1000.0, 1.0) == [3, 2, 1]
    assert rank_splits(4, 1.0, 1000.0) == [1, 2, 3]
    assert rank_splits(1, 1.0, 1.0) == []


@pytest.mark.parametrize(("decode_step_s", "devices_per_engine"), [(0.5, 2), (0.0, 1)])
def test_engines_are_wide_where_fixed_step_costs_are_high(
    decode_step_s: float, devices_per_engine: int
) -> None:
    # Half a second of a step is shared by twice the sequences where an engine has two devices.
    # Without it, two small engines read as fast as one of twice the size, and wait for no link.
    question = ask(
        model="qwen2.5-1.5b",
        devices=4,
        context=2048,
        groups_per_batch=8,
        samples_per_group=4,
        slots=8,
        figure="",
    )
    question = chz.replace(question, rollout_devices=2, decode_step_s=decode_step_s)
    assert (
        plan_cluster(question, known_shape(question.model)).best.devices_per_engine
        == devices_per_engine
    )


def test_the_best_split_of_a_small_cluster_is_found() -> None:
    question = ask(
        model="qwen2.5-1.5b",
        devices=4,
        context=2048,
        groups_per_batch=8,
        samples_per_group=4,
        slots=8,
        steps=100,
        figure="",
    )
    found = plan_cluster(question, known_shape(question.model))
    assert found.best.tokens_per_s == max(candidate.tokens_per_s for candidate in found.candidates)
    assert [candidate.rollout_devices for candidate in found.candidates] == [1, 2, 3]
    assert found.best.tokens_per_s > found.synchronous.tokens_per_s
    assert found.hours == pytest.approx(100 * found.best.outcome.step_s / 3600)
    text = found.text()
    for words in ("4 x H100", "bounded by", "hours for 100 steps", "times slower"):
        assert words in text
