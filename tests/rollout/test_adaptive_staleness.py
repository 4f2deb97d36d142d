"""The bound on staleness that follows the effective share of sequences."""

from __future__ import annotations

import math

import chz
import pytest

from areal_jax.records import RolloutState
from areal_jax.rollout.adaptive_staleness import adapt_limit
from areal_jax.rollout.config import RolloutConfig
from areal_jax.rollout.controller import open_gate
from areal_jax.rollout.gate import Gate

CONFIG = RolloutConfig(max_staleness=16, groups_per_batch=4, min_sequence_ess=0.9)


def step(gate: Gate, config: RolloutConfig, ess: float, staleness: float) -> int | None:
    metrics = {"sequence_ess": ess, "staleness": (10.0 * staleness, 10.0)}
    adapt_limit(gate, config, metrics)
    return gate.limit


def run_steps(config: RolloutConfig, c: float, num_steps: int) -> tuple[Gate, list[float]]:
    """Train on data whose effective share falls as exp(-c s²); return the shares."""
    gate, shares = open_gate(config, 0)[0], list[float]()
    started = [0]  # version that started each group
    for version in range(num_steps):
        while gate.capacity():
            gate.start()
            gate.accept()
            started.append(version)
        batch = started[1 + 4 * version : 5 + 4 * version]
        staleness = version - sum(batch) / 4
        shares.append(math.exp(-c * staleness**2))
        step(gate, config, shares[-1], staleness)
        gate.version = version + 1
    return gate, shares


@pytest.mark.parametrize("max_staleness", [16, 40])
def test_limit_settles_where_the_share_is_the_minimum(max_staleness: int) -> None:
    config = chz.replace(CONFIG, max_staleness=max_staleness, max_running_groups=10**6)
    # At staleness 5 the share is 0.905, at 6 0.866.
    gate, shares = run_steps(config, 0.004, 200)
    assert gate.limit in (4, 5, 6)
    assert sum(share >= 0.9 for share in shares[60:]) >= 0.7 * len(shares[60:])
    assert min(shares[60:]) > 0.85


def test_one_step_finds_the_limit() -> None:
    gate = open_gate(CONFIG, 0)[0]
    gate.limit = None
    # exp(-c 16²) = 0.5 gives 0.9 at 16 sqrt(ln 0.9 / ln 0.5) = 6.24.
    assert step(gate, CONFIG, 0.5, 16.0) == 6


def test_older_batches_lower_nothing() -> None:
    gate = open_gate(CONFIG, 0)[0]
    gate.limit = 6
    assert step(gate, CONFIG, 0.5, 14.0) == 6
    assert step(gate, CONFIG, 0.5, 6.0) == 2


def test_limit_rises_to_the_bound_and_ends() -> None:
    gate = open_gate(CONFIG, 0)[0]
    gate.limit = 13
    limits = [step(gate, CONFIG, 0.99, 1.0) for _ in range(4)]
    assert limits == [14, 15, None, None]
    # Between the minimum and the middle nothing changes.
    gate.limit = 7
    assert step(gate, CONFIG, 0.94, 7.0) == 7


def test_fixed_bound_and_steps_without_tokens_change_nothing() -> None:
    fixed = chz.replace(CONFIG, min_sequence_ess=None)
    assert step(open_gate(fixed, 0)[0], fixed, 0.1, 16.0) is None
    gate = open_gate(CONFIG, 0)[0]
    adapt_limit(gate, CONFIG, {"staleness": (0.0, 0.0), "sequence_ess": 0.1})
    assert gate.limit == 0


def test_limit_closes_the_gate_until_the_trainer_catches_up() -> None:
    gate = Gate(16, 4, 1000, of_kind={"code": 32})
    assert (gate.capacity(), gate.capacity("math"), gate.capacity("code")) == (132, 68, 132)
    gate.limit = 2
    assert {gate.capacity(), gate.capacity("math"), gate.capacity("code")} == {12}
    for _ in range(12):
        gate.start()
    assert gate.capacity() == 0
    assert "limited to 2" in repr(gate)
    gate.limit = None
    assert gate.capacity("math") == 56


def test_run_starts_synchronous_and_widens_step_by_step() -> None:
    gate = open_gate(CONFIG, 0)[0]
    assert gate.limit == 0
    assert [step(gate, CONFIG, 0.99, 0.0) for _ in range(3)] == [1, 2, 3]


def test_limit_is_restored() -> None:
    state = RolloutState({}, 0, {}, (), (), staleness_limit=3)
    assert open_gate(CONFIG, 5, state)[0].limit == 3
    fixed = chz.replace(CONFIG, min_sequence_ess=None)
    assert open_gate(fixed, 5, state)[0].limit is None
