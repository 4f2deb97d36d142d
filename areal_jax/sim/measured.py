"""Measured stage times of a real run, to simulate it or to split devices.

Engine, grading and weight-update times come from the spans of trace.json, trainer throughput from
metrics.jsonl.
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
from areal_jax.sim.engine import EngineBehavior
from areal_jax.sim.simulation import Failures


class StageTimes(NamedTuple):
    """Seconds, by stage."""

    decode_step_s: float
    """Decode step of an engine, including the gap between two dispatches."""
    prefill_token_s: float
    """Prefill, per prompt token."""
    recompute_token_s: float
    """Cache rebuild at a weight update, per token; the prefill time if no cache was rebuilt."""
    train_token_s: float
    """Training, per token of a batch, prompts included."""
    train_step_s: float
    """Trainer step."""
    grading_s: float
    """Grading, from the end of an answer to its reward."""
    travel_s: float
    """Weight update, from the trainer's step to the engines."""


def stage_times(run_folder: Path, steps_per_dispatch: int) -> StageTimes:
    """Return the mean stage times of a run.

    Raises:
        ValueError: the run recorded no decoding or no training.
    """
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
            f"{run_folder} has no record of {'training' if by_engine else 'decoding'}; set "
            "metrics.trace=true and run it again"
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
    """Return the seconds of a dispatch, of prefill per token, and of a rebuild per token.

    A prefill is enqueued without waiting: the extra time of the dispatch after it is the prefill's.
    """
    seconds, tokens = defaultdict[str, list[float]](list), defaultdict[str, float](float)
    gaps, until_s, behind_prefill = list[float](), None, False
    for span in spans:
        start_s, end_s = span["ts"] / 1e6, (span["ts"] + span["dur"]) / 1e6
        if until_s is not None and start_s > until_s:
            gaps.append(start_s - until_s)
        # A dispatch may be enqueued while the previous one runs.
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
        raise ValueError(
            "expected dispatches of every engine in the trace, found an engine without"
        )
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
    # Most gaps are host time; the long ones are idle engines, which the median leaves out.
    return dispatch_s + (median(gaps) if gaps else 0.0), prefill_token_s, recompute_token_s


@dataclass(frozen=True)
class ConstantStepEngine:
    """An engine whose step time does not depend on the number of running sequences.

    Its program computes every slot.
    """

    times: StageTimes
    kv_tokens: int = 1 << 40
    copy_s: float = 0.0

    def step(self, num_sequences: int) -> Step:
        """Return the measured step time."""
        del num_sequences
        return Step(self.times.decode_step_s, 0.0)

    def prefill_s(self, tokens: float, pairs: float) -> float:
        """Return a time proportional to the tokens."""
        del pairs
        return tokens * self.times.prefill_token_s

    def recompute_s(self, tokens: float, pairs: float) -> float:
        """Return a time proportional to the tokens."""
        del pairs
        return tokens * self.times.recompute_token_s


@dataclass(frozen=True)
class MeasuredStages:
    """Stages with the measured times of a run."""

    times: StageTimes
    behavior: EngineBehavior
    num_engines: int = 1
    stall_s: float = 0.0
    failures: Failures | None = None

    @property
    def engine(self) -> ConstantStepEngine:
        return ConstantStepEngine(self.times)

    @property
    def rewards(self) -> Rewards:
        # The measured time includes the wait for a worker.
        return Rewards(num_workers=1 << 12, grading_s=self.times.grading_s)

    def arrivals_s(self) -> list[float]:
        """Return the same arrival for all engines."""
        return [self.times.travel_s] * self.num_engines

    def train_s(self, lengths: Float[np.ndarray, "N"], num_mini_batches: int) -> float:
        """Return a time proportional to the tokens."""
        del num_mini_batches
        return float(lengths.sum()) * self.times.train_token_s
