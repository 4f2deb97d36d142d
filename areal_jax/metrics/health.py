"""Health checks of training: what a window of metric rows says of a run that cannot learn. Rows in,
findings out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from areal_jax.metrics import names
from areal_jax.metrics.config import HealthConfig

PREFIX = "health/"
"""Of the metrics: `health/NAME` is 1 while the check finds something, 0 while it does not."""

NEARLY_ALL = 0.95
"""Share of samples or groups that counts as all of them: one lucky sample of a hundred does not
make a run healthy."""

Row: TypeAlias = Mapping[str, float]
"""Metrics of one step."""

Window: TypeAlias = Sequence[Row]
"""Consecutive rows. The first one is that of the step before the window, for counters; empty at the
start of a run."""


class Check(NamedTuple):
    """One way in which a run cannot learn."""

    name: str
    reads: tuple[str, ...]
    """Metrics without any of which the check does not apply."""
    holds: Callable[[Window, HealthConfig], bool]
    """Whether the window shows it."""
    meaning: str
    remedy: str
    """What to change."""
    workflow: str = ""
    """Class of the workflow that it applies to; empty: all."""


def values(window: Window, name: str) -> list[float]:
    """A metric in every step of the window; nan where a step does not have it."""
    return [row.get(name, math.nan) for row in window[1:]]


def always(window: Window, name: str, predicate: Callable[[float], bool]) -> bool:
    """Whether a metric is so in every step of the window. Comparisons with nan are false: a step
    without it is none of them."""
    return all(predicate(value) for value in values(window, name))


def mean(window: Window, name: str) -> float:
    """Mean of a metric over the window; nan where a step does not have it."""
    found = values(window, name)
    return sum(found) / len(found)


def growth(window: Window, *counters: str) -> float:
    """By how much counters, which only grow, grew together within the window."""
    return math.fsum(window[-1].get(name, 0.0) - window[0].get(name, 0.0) for name in counters)


def rejected_share(window: Window, *reasons: str) -> float:
    """Of the groups that ended within the window, the share that was rejected for one of the
    reasons."""
    ended = growth(window, "rollout/accepted", "rollout/rejected")
    return (
        growth(window, *(f"rollout/rejected/{reason}" for reason in reasons)) / ended
        if ended > 0
        else 0.0
    )


def without_signal(window: Window, config: HealthConfig) -> bool:
    all_equal = always(window, "trainer/groups_without_signal", lambda share: share >= 1.0)
    return all_equal or rejected_share(window, "no_signal") >= NEARLY_ALL


def ratios_out_of_range(window: Window, config: HealthConfig) -> bool:
    def is_far(ratio: float) -> bool:
        return ratio > config.max_ratio or ratio < 1.0 / config.max_ratio

    return always(window, "trainer/ratio", is_far) or always(
        window, "trainer/behave_weight", is_far
    )


def too_old(window: Window, config: HealthConfig) -> bool:
    stale, trained = (
        sum(values(window, f"trainer/tokens_{which}")) for which in ("stale", "trained")
    )
    return stale > config.max_lost_share * (stale + trained)


def without_gradient(window: Window, config: HealthConfig) -> bool:
    found = zip(
        values(window, names.GRAD_NORM), values(window, "trainer/value_grad_norm"), strict=True
    )
    return not any(norm > 0.0 and math.isfinite(norm) for norms in found for norm in norms)


def rejected_otherwise(window: Window, config: HealthConfig) -> bool:
    counted = {
        name.removeprefix("rollout/rejected/")
        for name in window[-1]
        if name.startswith("rollout/rejected/")
    }
    return (
        rejected_share(window, *(counted - {"no_signal", *REWARD_FAILURES, *AGENT_FAILURES}))
        > config.max_lost_share
    )


def rewards_failing(window: Window, config: HealthConfig) -> bool:
    calls = growth(window, "rewards/calls")
    failed = growth(window, "rewards/failed") / calls if calls > 0 else 0.0
    return max(failed, rejected_share(window, *REWARD_FAILURES)) > config.max_lost_share


REWARD_FAILURES = ("grading_failed", "tool_failed")
AGENT_FAILURES = ("agent_failed", "timeout_error")
"""Reasons for which groups are rejected: classes of errors, in snake case."""

CHECKS = (
    Check(
        "no_signal",
        ("trainer/groups_without_signal",),
        without_signal,
        "in no group do samples differ in their reward, so that all advantages are zero",
        "take easier or harder tasks (tasks.success_rate_above, tasks.success_rate_below), raise "
        "rollout.samples_per_group, "
        "and check the reward",
    ),
    Check(
        "all_truncated",
        ("trainer/truncated_fraction",),
        lambda window, config: mean(window, "trainer/truncated_fraction") >= NEARLY_ALL,
        "answers are cut before they end",
        "raise engine.max_new_tokens; in conversations of several turns, engine.max_prompt_tokens",
    ),
    Check(
        "no_answers",
        ("trainer/no_answer_fraction",),
        lambda window, config: mean(window, "trainer/no_answer_fraction") >= NEARLY_ALL,
        "the verifier finds no answer in what the policy writes",
        "ask for the form that it reads with prompt.suffix (such as \\boxed{}), set "
        "rewards.accept_plain=true, or lower "
        "rewards.form's demands",
    ),
    Check(
        "entropy_collapsed",
        ("trainer/entropy",),
        lambda window, config: always(
            window, "trainer/entropy", lambda entropy: entropy < config.min_entropy
        ),
        (
            "the policy's entropy is below health.min_entropy: it samples the same answer again "
            "and "
            "again"
        ),
        "go back to an earlier checkpoint and lower trainer.optimizer.learning_rate, raise "
        "trainer.entropy_coef or "
        "trainer.loss.clip_eps_high",
    ),
    Check(
        "ratios_out_of_range",
        ("trainer/ratio",),
        ratios_out_of_range,
        (
            "mean importance ratios are further from 1 than health.max_ratio: the policy that "
            "samples is not the one that trains"
        ),
        (
            "lower trainer.optimizer.learning_rate or rollout.max_staleness, or set "
            "trainer.loss.importance_weighting.cap"
        ),
    ),
    Check(
        "stale_tokens",
        ("trainer/tokens_stale",),
        too_old,
        (
            "more than health.max_lost_share of the sampled tokens are older than "
            "rollout.max_staleness and are not trained on"
        ),
        "raise rollout.max_staleness, or lower rollout.max_running_groups or engine.max_new_tokens",
    ),
    Check(
        "no_gradient",
        (names.REWARD, names.LOSS),
        without_gradient,
        "no update has changed the policy: its gradient is zero, not finite, or of no token",
        "see the other findings; without any, check trainer.loss and trainer.advantages",
    ),
    Check(
        "tools_never_called",
        ("trainer/turns",),
        lambda window, config: always(window, "trainer/turns", lambda turns: turns <= 1.0),
        "no sample has called a tool",
        (
            "set workflow.announce=true, set workflow.call_format to what the policy has learnt, "
            "or "
            "fine-tune it on calls"
        ),
        workflow="ToolUse",
    ),
    Check(
        "second_turns_never_taken",
        ("trainer/turns",),
        lambda window, config: (
            always(window, "trainer/turns", lambda turns: turns <= 1.0)
            and mean(window, "trainer/correct_fraction") < 1.0
        ),
        "no sample has had a second turn, though answers were wrong",
        "raise engine.max_prompt_tokens: the first answer and the feedback are part of the second prompt",
        workflow="MultiTurn",
    ),
    Check(
        "reward_failures",
        ("rollout/accepted",),
        rewards_failing,
        (
            "more than health.max_lost_share of the reward calls fail, or of the groups because a "
            "reward call or a tool fails"
        ),
        (
            "see the log for its error; raise rewards.timeout_s or rewards.num_workers where it is "
            "too slow"
        ),
    ),
    Check(
        "agents_failing",
        ("rollout/accepted",),
        lambda window, config: rejected_share(window, *AGENT_FAILURES) > config.max_lost_share,
        (
            "more than health.max_lost_share of the groups are rejected because an agent fails or "
            "times out"
        ),
        "see the log for its error; raise engine.max_prompt_tokens where its calls do not fit, "
        "workflow.timeout_s where it is "
        "too slow",
        workflow="Agent",
    ),
    Check(
        "groups_rejected",
        ("rollout/accepted",),
        rejected_otherwise,
        "more than health.max_lost_share of the groups are rejected",
        (
            "see rollout/rejected/* and the log for the reasons; prompts that do not fit need "
            "engine.max_prompt_tokens"
        ),
    ),
)
"""All checks. Each looks at a window of health.window_steps steps."""


def find(window: Window, config: HealthConfig, workflow: str) -> dict[str, bool]:
    """What each check that applies finds in a window, by name.

    Args:
        workflow: its class."""
    return {
        check.name: check.holds(window, config)
        for check in CHECKS
        if check.workflow in ("", workflow) and any(name in window[-1] for name in check.reads)
    }


def check_named(name: str) -> Check:
    """The check of that name."""
    return next(check for check in CHECKS if check.name == name)


class HealthMonitor:
    """Applies the checks to the steps of a run, one after another. A resumed run begins with an
    empty window."""

    def __init__(self, config: HealthConfig, workflow: str, num_steps: int) -> None:
        """Args: num_steps: of the run; a shorter run than the window has a window of its own
        length."""
        self._config, self._workflow = config, workflow
        self._rows = deque[Row](maxlen=1 + max(1, min(config.window_steps, num_steps)))
        self.active = dict[str, int]()
        """Findings that hold, each with the step at which it began."""
        self.has_learnt = False
        """Whether any update had a gradient."""

    def update(self, step: int, row: Row) -> dict[str, float]:
        """Take in the row of a step. Returns `health/NAME` for every check that applies."""
        if not self._rows:
            # Counters of a resumed run do not begin at 0: without the row before, its first row is
            # where they begin.
            self._rows.append({} if step == 0 else row)
        self._rows.append(row)
        self.has_learnt = self.has_learnt or not without_gradient([{}, row], self._config)
        found = find(list(self._rows), self._config, self._workflow)
        if len(self._rows) < (self._rows.maxlen or 0):
            found = dict.fromkeys(found, False)
        self.active = {name: self.active.get(name, step) for name, holds in found.items() if holds}
        return {PREFIX + name: float(holds) for name, holds in found.items()}

    def changes(self, before: Mapping[str, int], step: int) -> Iterator[str]:
        """A line for every finding that began or ended with a step. Args: before: `active` before
        it."""
        for name in (name for name in self.active if name not in before):
            check = check_named(name)
            yield f"health: {name} at step {step}: {check.meaning}; {check.remedy}"
        for name in (name for name in before if name not in self.active):
            yield f"health: {name} has ended at step {step}; it began at step {before[name]}"
