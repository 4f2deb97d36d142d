"""What the stages of a real run took, read from its folder: costs to simulate it with, and to split
devices by.

Spans of trace.json tell what engines, graders and the weight channel did; metrics.jsonl how fast
the trainer was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from areal_jax.metrics import jsonl, names, trace
from areal_jax.sim.costs import Rewards, Step
from areal_jax.sim.engine import EngineHabits
from areal_jax.sim.simulation import Failures


class StageTimes(NamedTuple):
    """Seconds, by stage."""

    decode_step_s: float
    """A decode step of an engine, whatever lies between two dispatches included."""
    prefill_token_s: float
    """A token of a prompt."""
    recompute_token_s: float
    """A token of a live sequence, when weights arrive; as in prefill, where none was rebuilt."""
    train_token_s: float
    """A token of a batch, prompts included."""
    train_step_s: float
    """A batch."""
    grading_s: float
    """An answer, from its end to its grade."""
    travel_s: float
    """Weights, from the trainer's step to the engines."""


def stage_times(run_folder: Path, steps_per_dispatch: int) -> StageTimes:
    """What the stages of a run took on average. ValueError names what the run has not done, or not
    recorded."""
    spans = [event for event in trace.read(run_folder / "trace.json") if event.get("ph") == "X"]
    by_name = defaultdict[str, list[float]](list)
    by_engine = defaultdict[int, list[dict[str, Any]]](list)
    for span in spans:
        if "engine" in span["args"]:
            by_engine[span["args"]["engine"]].append(span)
        else:
            by_name["grader" if "task" in span["args"] else span["name"].split()[0]].append(
                span["dur"] / 1e6
            )
    speeds = [
        row[names.TRAIN_TOKENS_PER_S]
        for row in jsonl.read(run_folder / "metrics.jsonl")
        if names.TRAIN_TOKENS_PER_S in row
    ]
    if not by_engine or not speeds:
        raise ValueError(
            f"{run_folder} tells of no {'training' if by_engine else 'decoding'}; is "
            "metrics.trace=true?"
        )
    engines = [
        _engine_times(sorted(spans, key=lambda span: span["ts"] + span["dur"]))
        for spans in by_engine.values()
    ]
    dispatch_s, prefill_s, recompute_s = (fmean(times) for times in zip(*engines, strict=True))
    return StageTimes(
        decode_step_s=dispatch_s / steps_per_dispatch,
        prefill_token_s=prefill_s,
        recompute_token_s=recompute_s,
        train_token_s=fmean(1 / speed for speed in speeds),
        train_step_s=_mean(by_name["step"]),
        grading_s=_mean(by_name["grader"]),
        travel_s=_mean(by_name["weights"]),
    )


def _mean(times: Sequence[float]) -> float:
    return fmean(times) if times else 0.0


def _engine_times(spans: Iterable[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Seconds of a dispatch, of a token's prefill and of a token's recomputing. A prefill is
    enqueued and not waited for, so that what a dispatch behind it takes beyond others is the
    prefill's."""
    seconds, tokens = defaultdict[str, list[float]](list), defaultdict[str, float](float)
    gaps, until_s, behind_prefill = list[float](), None, False
    for span in spans:
        start_s, end_s = span["ts"] / 1e6, (span["ts"] + span["dur"]) / 1e6
        if until_s is not None and start_s > until_s:
            gaps.append(start_s - until_s)
        # A dispatch may be enqueued while the one before is under way.
        own_s = end_s - max(start_s, until_s or start_s)
        match span["name"]:
            case "dispatch":
                seconds["behind prefill" if behind_prefill else "dispatch"].append(own_s)
                behind_prefill = False
            case "prefill":
                seconds["prefill"].append(own_s)
                tokens["prefill"] += span["args"]["tokens"]
                behind_prefill = True
            case "swap":
                if span["args"]["recompute_tokens"]:
                    seconds["recompute"].append(own_s)
                    tokens["recompute"] += span["args"]["recompute_tokens"]
        until_s = end_s
    alone = seconds["dispatch"] or seconds["behind prefill"]
    if not alone:
        raise ValueError("an engine has decoded nothing")
    dispatch_s = fmean(alone)
    prefill_s = (
        sum(seconds["prefill"])
        + sum(seconds["behind prefill"])
        - dispatch_s * len(seconds["behind prefill"])
    )
    prefill_token_s = max(0.0, prefill_s) / max(1.0, tokens["prefill"])
    recompute_token_s = (
        sum(seconds["recompute"]) / tokens["recompute"] if tokens["recompute"] else prefill_token_s
    )
    # Most gaps are the host's; the long ones are an engine's that has nothing to do.
    return dispatch_s + (median(gaps) if gaps else 0.0), prefill_token_s, recompute_token_s


@dataclass(frozen=True)
class MeasuredEngine:
    """An engine whose step takes as long whatever is seated in it: its program computes every
    slot."""

    times: StageTimes
    kv_tokens: int = 1 << 40
    copy_s: float = 0.0

    def step(self, num_sequences: int) -> Step:
        """As measured."""
        del num_sequences
        return Step(self.times.decode_step_s, 0.0)

    def prefill_s(self, tokens: float, pairs: float) -> float:
        """By tokens."""
        del pairs
        return tokens * self.times.prefill_token_s

    def recompute_s(self, tokens: float, pairs: float) -> float:
        """By tokens."""
        del pairs
        return tokens * self.times.recompute_token_s


@dataclass(frozen=True)
class MeasuredStages:
    """The machines of a run, as it found them."""

    times: StageTimes
    habits: EngineHabits
    num_engines: int = 1
    stand_still_s: float = 0.0
    failures: Failures | None = None

    @property
    def engine(self) -> MeasuredEngine:
        return MeasuredEngine(self.times)

    @property
    def rewards(self) -> Rewards:
        # What an answer waited for a worker is in its time.
        return Rewards(num_workers=1 << 12, grading_s=self.times.grading_s)

    def arrivals_s(self) -> list[float]:
        """All at once."""
        return [self.times.travel_s] * self.num_engines

    def train_s(self, lengths: Float[np.ndarray, "N"], num_mini_batches: int) -> float:
        """By tokens."""
        del num_mini_batches
        return float(lengths.sum()) * self.times.train_token_s
