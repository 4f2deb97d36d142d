"""Choice of the split of devices from measured stage times."""

from __future__ import annotations

import pytest

from areal_jax.sim.split_choice import (
    FULLNESS,
    NUM_FIRST,
    NUM_SKIPPED,
    NUM_STEPS,
    SplitChooser,
    StepTimes,
)

WAITING = StepTimes(train_s=2.0, wait_s=8.0, elapsed_s=10.0, busy=0.9, full=0.5, tokens=1000.0)
"""4 rollout devices need 10 s for a batch, 4 train devices 2 s."""

IDLING = StepTimes(train_s=10.0, wait_s=0.0, elapsed_s=10.0, busy=0.5, full=0.25, tokens=1000.0)


def chooser(*times: StepTimes, splits: range = range(1, 8)) -> SplitChooser:
    """Return one at 4 of 8 devices that has measured these times in each of its last steps."""
    found = SplitChooser(8, splits, 4)
    for each in [*NUM_FIRST * [WAITING], *times]:
        found.observe(each)
    return found


def free(rollout: int) -> float:
    return 0.0


def test_waiting_trainer_gives_devices_to_decoding() -> None:
    # 40 device-seconds to generate and 8 to train on: 40 / 6 s and 8 / 2 s are best of all splits,
    # since 8 / 1 s at 7 devices is longer than 40 / 6.
    move = chooser(*NUM_STEPS * [WAITING]).choose(100, free)
    assert move is not None
    assert (move.rollout, move.generate_s, move.train_s) == (6, 40.0, 8.0)
    assert move.forecast_s == pytest.approx(10.0 * (40 / 6) / 10)


def test_idle_engines_give_devices_to_training() -> None:
    # 4 x 10 s x 0.5 x 0.25^0.75 = 7.07 device-seconds to generate, and 40 to train on: of 1 and 2
    # rollout devices, 2 are best (3.5 and 6.7 s, in place of 7.1 and 5.7).
    move = chooser(*NUM_STEPS * [IDLING]).choose(100, free)
    assert move is not None
    assert move.generate_s == pytest.approx(20 * 0.25**FULLNESS)
    assert (move.rollout, move.train_s) == (2, 40.0)
    assert move.forecast_s == pytest.approx(40 / 6)


def test_only_possible_splits_are_chosen() -> None:
    move = chooser(*NUM_STEPS * [WAITING], splits=range(4, 8, 3)).choose(100, free)
    # Of 4 and 7: 8 s in place of 10.
    assert move is not None and (move.rollout, move.forecast_s) == (7, 8.0)


def test_a_move_must_save_more_than_it_costs() -> None:
    # It saves 3.33 s in each step.
    found = chooser(*NUM_STEPS * [WAITING])
    assert found.choose(30, lambda _: 99.0) is not None
    assert found.choose(29, lambda _: 99.0) is None
    # Times of a first return to a split must pay twice.
    found.rollout, found._num_visits[6] = 4, 1
    assert found.choose(30, lambda _: 99.0) is None


def test_first_steps_and_those_after_a_move_are_not_measured() -> None:
    found = SplitChooser(8, range(1, 8), 4)
    for _ in range(NUM_FIRST + NUM_STEPS - 1):
        found.observe(WAITING)
    assert found.choose(100, free) is None
    found.observe(WAITING)
    assert found.choose(100, free) is not None
    found.moved(6)
    for _ in range(NUM_SKIPPED + NUM_STEPS - 1):
        found.observe(WAITING)
    assert found.choose(100, free) is None


def test_no_split_is_chosen_while_the_workload_shifts() -> None:
    times = [*(NUM_STEPS - 1) * [WAITING], WAITING._replace(tokens=2000.0)]
    assert chooser(*times).choose(100, free) is None


def test_measured_generation_outweighs_an_estimate() -> None:
    # With 5 devices generation took 50 device-seconds, so that 6, where engines idle, are not left.
    found = SplitChooser(8, range(1, 8), 5)
    for _ in range(NUM_FIRST + NUM_STEPS):
        found.observe(WAITING._replace(train_s=6.0, wait_s=4.0))
    assert found.choose(100, free) is not None
    found.moved(6)
    for _ in range(NUM_SKIPPED + NUM_STEPS):
        found.observe(IDLING._replace(train_s=9.0, elapsed_s=9.0))
    assert found.choose(100, free) is None
