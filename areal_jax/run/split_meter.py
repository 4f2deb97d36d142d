"""Measured steps of a run whose devices move between training and decoding, and its moves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from areal_jax.metrics import names
from areal_jax.sim.split_choice import Move, SplitChooser, StepTimes


class SplitMeter:
    """Gives the times of the steps to the chooser of splits, and counts moves."""

    def __init__(self, num_devices: int, splits: Sequence[int], rollout: int) -> None:
        """Arguments as of `SplitChooser`."""
        self.chooser = SplitChooser(num_devices, splits, rollout)
        self.stall_s = 0.0
        """Seconds that the last move took."""
        self.num_moves, self.stalled_s = 0, 0.0
        self._since_s, self._waited_s = time.perf_counter(), 0.0

    def observe(self, row: Mapping[str, float], num_engines: int | None) -> None:
        """Measure a step by its row of metrics.

        Args:
            row: Metrics of the step.
            num_engines: Number of engines during the step; None: it is not measured.
        """
        now_s, waited_s = time.perf_counter(), row["rollout/batch_wait_s"]
        elapsed_s, wait_s = now_s - self._since_s, waited_s - self._waited_s
        self._since_s, self._waited_s = now_s, waited_s
        if num_engines is None:
            return
        train_s = row["trainer/seconds_step"]
        self.chooser.observe(
            StepTimes(
                train_s=train_s,
                wait_s=wait_s,
                elapsed_s=elapsed_s,
                busy=max(0.0, 1 - row["rollout/wait_s"] / (elapsed_s * num_engines)),
                full=max(row.get(f"rollout/{name}", 0.0) for name in ("occupancy", "kv_used")),
                tokens=row[names.TRAIN_TOKENS_PER_S] * train_s,
            )
        )

    def moved(self, rollout: int, stall_s: float) -> None:
        """Count a move to a split, which stopped training for `stall_s`."""
        self.chooser.moved(rollout)
        self.num_moves += 1
        self.stall_s = stall_s
        self.stalled_s += stall_s

    def counters(self) -> dict[str, float]:
        """Return counts since the start of this process."""
        return {"split_moves": float(self.num_moves), "split_stall_s": self.stalled_s}


def describe_reason(move: Move) -> str:
    """Return the measured and forecast times of a move."""
    return (
        f"a batch takes {move.generate_s:.3g} device-seconds to generate and {move.train_s:.3g} to "
        f"train on, a step {move.step_s:.3g} s, forecast {move.forecast_s:.3g} s; "
    )
