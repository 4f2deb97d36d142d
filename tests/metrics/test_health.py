"""Health checks: findings from rows of metrics."""

from __future__ import annotations

import math
from collections.abc import Callable

import chz
import pytest

from areal_jax.metrics import names
from areal_jax.metrics.config import HealthConfig
from areal_jax.metrics.health import CHECKS, PREFIX, HealthMonitor, Row

CONFIG = HealthConfig(window_steps=3)


def healthy(step: int) -> dict[str, float]:
    """Row of a step of a healthy run; counters are those after the step."""
    return {
        names.REWARD: 0.5,
        names.LOSS: 0.1,
        names.GRAD_NORM: 0.3,
        "trainer/groups_without_signal": 0.9,
        "trainer/truncated_fraction": 0.9,
        "trainer/no_answer_fraction": 0.9,
        "trainer/correct_fraction": 0.1,
        "trainer/turns": 1.1,
        "trainer/entropy": 0.02,
        "trainer/ratio": 1.9,
        "trainer/behave_weight": 0.6,
        "trainer/sequence_ess": 0.51,
        "trainer/tokens_stale": 50.0,
        "trainer/tokens_trained": 60.0,
        "rollout/accepted": 4.0 * (step + 1),
        # Half of the groups that end are rejected, for all reasons together.
        "rollout/rejected": 4.0 * (step + 1),
        **{
            f"rollout/rejected/{reason}": 1.0 * (step + 1)
            for reason in ("grading_failed", "agent_failed", "invalid_request", "no_signal")
        },
    }


def rejected(reason: str, share: float) -> Callable[[int], Row]:
    """Rows in which this share of the 20 groups that end per step is rejected for one reason."""
    return lambda step: {
        "rollout/accepted": 20 * (1 - share) * (step + 1),
        "rollout/rejected": 20 * share * (step + 1),
        f"rollout/rejected/{reason}": 20 * share * (step + 1),
    }


def found(
    changes: Callable[[int], Row], workflow: str = "SingleTurn", first: int = 0, steps: int = 3
) -> set[str]:
    """Return the checks with active findings after these steps."""
    monitor, row = HealthMonitor(CONFIG, workflow, 100), dict[str, float]()
    for step in range(first, first + steps):
        row = monitor.update(step, {**healthy(step), **changes(step)})
    assert set(monitor.active) == {
        name.removeprefix(PREFIX) for name, value in row.items() if value
    }
    return set(monitor.active)


CASES = [
    ({"trainer/groups_without_signal": 1.0}, "SingleTurn", {"no_signal"}),
    ({"trainer/truncated_fraction": 0.96}, "SingleTurn", {"all_truncated"}),
    ({"trainer/no_answer_fraction": 0.96}, "SingleTurn", {"no_answers"}),
    ({"trainer/entropy": 0.009}, "SingleTurn", {"entropy_collapsed"}),
    ({"trainer/ratio": 2.1}, "SingleTurn", {"ratios_out_of_range"}),
    ({"trainer/ratio": 0.4}, "SingleTurn", {"ratios_out_of_range"}),
    ({"trainer/behave_weight": math.inf}, "SingleTurn", {"ratios_out_of_range"}),
    ({"trainer/sequence_ess": 0.49}, "SingleTurn", {"off_policy"}),
    ({"trainer/tokens_stale": 61.0}, "SingleTurn", {"stale_tokens"}),
    ({names.GRAD_NORM: 0.0}, "SingleTurn", {"no_gradient"}),
    ({names.GRAD_NORM: math.nan}, "SingleTurn", {"no_gradient"}),
    # A critic that learns before its policy does.
    ({names.GRAD_NORM: math.nan, "trainer/value_grad_norm": 0.1}, "SingleTurn", set()),
    ({"trainer/turns": 1.0}, "SingleTurn", set()),
    ({"trainer/turns": 1.0}, "ToolUse", {"tools_never_called"}),
    ({"trainer/turns": 1.0}, "MultiTurn", {"second_turns_never_taken"}),
    # Nothing was wrong, so nothing was tried again.
    ({"trainer/turns": 1.0, "trainer/correct_fraction": 1.0}, "MultiTurn", set()),
    (rejected("grading_failed", 0.6), "SingleTurn", {"reward_failures"}),
    (rejected("tool_failed", 0.6), "ToolUse", {"reward_failures"}),
    (
        lambda step: {"rewards/calls": 20.0 * step, "rewards/failed": 12.0 * step},
        "Agent",
        {"reward_failures"},
    ),
    (lambda step: {"rewards/calls": 20.0 * step, "rewards/failed": 4.0 * step}, "Agent", set()),
    (rejected("agent_failed", 0.6), "Agent", {"agents_failing"}),
    (rejected("timeout_error", 0.6), "Agent", {"agents_failing"}),
    (rejected("invalid_request", 0.6), "SingleTurn", {"groups_rejected"}),
    (rejected("no_signal", 0.6), "SingleTurn", set()),
    (rejected("no_signal", 0.96), "SingleTurn", {"no_signal"}),
]


@pytest.mark.parametrize(("changes", "workflow", "expected"), CASES)
def test_each_check_finds_its_own_fault_only(
    changes: Row | Callable[[int], Row], workflow: str, expected: set[str]
) -> None:
    changed = changes if callable(changes) else lambda _: changes
    assert found(lambda _: {}, workflow) == set()
    assert found(changed, workflow) == expected
    # One good step in the window, and for means a very good one, is health.
    good = {
        name: 0.0
        for name in (
            "trainer/truncated_fraction",
            "trainer/no_answer_fraction",
            "trainer/tokens_stale",
        )
    }
    if not callable(changes):
        assert (
            found(
                lambda step: (
                    good | {"trainer/correct_fraction": 0.1} if step == 1 else changed(step)
                ),
                workflow,
            )
            == set()
        )


def test_counters_of_a_resumed_run_start_at_its_first_row() -> None:
    def only_rejected(step: int) -> Row:
        return {
            "rollout/accepted": 5000.0,
            "rollout/rejected": 20.0 * step,
            "rollout/rejected/invalid_request": 20.0 * step,
        }

    assert found(only_rejected, first=50) == {"groups_rejected"}


def test_every_check_is_tested() -> None:
    assert set().union(*(expected for *_, expected in CASES)) == {check.name for check in CHECKS}


def test_finding_needs_a_whole_window_and_logs_its_begin_and_end() -> None:
    monitor, lines, metrics = HealthMonitor(CONFIG, "SingleTurn", 100), list[str](), list[float]()
    for step, entropy in enumerate((0.001, 0.001, 0.001, 0.001, 0.5)):
        before = monitor.active
        metrics.append(
            monitor.update(step, healthy(step) | {"trainer/entropy": entropy})[
                "health/entropy_collapsed"
            ]
        )
        lines += monitor.changes(before, step)
    assert metrics == [0.0, 0.0, 1.0, 1.0, 0.0]
    begun, ended = lines
    assert (
        begun.startswith("health: entropy_collapsed at step 2: the policy's entropy")
        and "trainer.entropy_coef" in begun
    )
    assert ended == "health: entropy_collapsed ended at step 4; it began at step 2"


def test_window_of_a_short_run_is_its_length() -> None:
    monitor = HealthMonitor(chz.replace(CONFIG, window_steps=10), "SingleTurn", 2)
    rows = [
        monitor.update(step, healthy(step) | {"trainer/entropy": 0.0})["health/entropy_collapsed"]
        for step in range(2)
    ]
    assert rows == [0.0, 1.0]


def test_checks_without_their_metrics_do_not_apply() -> None:
    monitor = HealthMonitor(CONFIG, "SingleTurn", 10)
    assert monitor.update(0, {names.LOSS: 1.0, names.GRAD_NORM: 0.5}) == {"health/no_gradient": 0.0}
    assert monitor.has_learnt


def test_step_without_tokens_has_no_gradient() -> None:
    monitor = HealthMonitor(chz.replace(CONFIG, window_steps=1), "SingleTurn", 10)
    assert monitor.update(0, {names.REWARD: 1.0, "trainer/tokens_trained": 0.0}) == {
        "health/no_gradient": 1.0
    }
    assert not monitor.has_learnt


def test_every_check_measures_a_number_and_names_its_range() -> None:
    window = [{}, *(healthy(step) for step in range(3))]
    thresholds = chz.asdict(CONFIG)
    measured = {check.name: format(check.measure(window, CONFIG), check.form) for check in CHECKS}
    # Stale are 50 of 110 tokens; of the groups that end, half are rejected,
    # a quarter of them for each of four reasons.
    assert measured == {
        "no_signal": "90.0%",
        "all_truncated": "90.0%",
        "no_answers": "90.0%",
        "entropy_collapsed": "0.02",
        "ratios_out_of_range": "1.9",
        "off_policy": "51.0%",
        "stale_tokens": "45.5%",
        "no_gradient": "0.3",
        "tools_never_called": "1.1",
        "second_turns_never_taken": "1.1",
        "reward_failures": "12.5%",
        "agents_failing": "12.5%",
        "groups_rejected": "12.5%",
    }
    assert {check.healthy.format(**thresholds) for check in CHECKS} == {
        "below 95%",
        "at least 0.01 nats",
        "within a factor of 2 of 1",
        "at most 50%",
        "at least 50%",
        "above 0",
        "above 1 turn",
    }
