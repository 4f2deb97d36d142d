"""Health checks of training: find runs that cannot learn from a window of metric rows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from areal_jax.metrics import names
from areal_jax.metrics.config import HealthConfig

PREFIX = "health/"
"""Prefix of the checks' metrics: `health/NAME` is 1 while the check has a finding, else 0."""

NEARLY_ALL = 0.95
"""Share of samples or groups that counts as all: one lucky sample in a hundred does not make a run
healthy."""

Row: TypeAlias = Mapping[str, float]
"""Metrics of one step."""

Window: TypeAlias = Sequence[Row]
"""Consecutive rows. The first is of the step before the window, for counters; empty at the start of
a run."""


class Check(NamedTuple):
    """A check for one cause of a run that cannot learn."""

    name: str
    reads: tuple[str, ...]
    """Metrics of which at least one must exist for the check to apply."""
    holds: Callable[[Window, HealthConfig], bool]
    """Returns whether the window shows the cause."""
    meaning: str
    remedy: str
    """Settings to change."""
    measure: Callable[[Window, HealthConfig], float]
    """Returns the measured value of the window."""
    healthy: str
    """Healthy range of the value; names in braces are thresholds of HealthConfig."""
    form: str = ".1%"
    """Format of the value."""
    workflow: str = ""
    """Class of the workflow that the check applies to; empty: all."""


def values(window: Window, name: str) -> list[float]:
    """Return a metric of every step of the window; nan for steps without it."""
    return [row.get(name, math.nan) for row in window[1:]]


def always(window: Window, name: str, predicate: Callable[[float], bool]) -> bool:
    """Return whether a predicate holds in every step of the window; comparisons with nan are
    false.
    """
    return all(predicate(value) for value in values(window, name))


def mean(window: Window, name: str) -> float:
    """Return the mean of a metric over the window; nan if a step does not have it."""
    found = values(window, name)
    return sum(found) / len(found)


def growth(window: Window, *counters: str) -> float:
    """Return the total increase of counters within the window."""
    return math.fsum(window[-1].get(name, 0.0) - window[0].get(name, 0.0) for name in counters)


def rejected_share(window: Window, *reasons: str) -> float:
    """Return the share of the window's ended groups that were rejected for one of the reasons."""
    ended = growth(window, "rollout/accepted", "rollout/rejected")
    return (
        growth(window, *(f"rollout/rejected/{reason}" for reason in reasons)) / ended
        if ended > 0
        else 0.0
    )


def share_without_signal(window: Window, config: HealthConfig) -> float:
    return max(
        _mean_of_known(window, "trainer/groups_without_signal"),
        rejected_share(window, "no_signal"),
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


def furthest_ratio(window: Window, config: HealthConfig) -> float:
    means = [_mean_of_known(window, name) for name in ("trainer/ratio", "trainer/behave_weight")]
    return max(means, key=lambda mean: max(mean, 1.0 / mean) if mean > 0.0 else math.inf)


def stale_share(window: Window, config: HealthConfig) -> float:
    stale, trained = (
        sum(values(window, f"trainer/tokens_{which}")) for which in ("stale", "trained")
    )
    return stale / (stale + trained) if stale + trained > 0.0 else 0.0


def without_gradient(window: Window, config: HealthConfig) -> bool:
    found = zip(
        values(window, names.GRAD_NORM), values(window, "trainer/value_grad_norm"), strict=True
    )
    return not any(norm > 0.0 and math.isfinite(norm) for norms in found for norm in norms)


def largest_gradient(window: Window, config: HealthConfig) -> float:
    norms = (*values(window, names.GRAD_NORM), *values(window, "trainer/value_grad_norm"))
    return max((norm for norm in norms if math.isfinite(norm)), default=0.0)


def share_rejected_for_other_reasons(window: Window, config: HealthConfig) -> float:
    counted = {
        name.removeprefix("rollout/rejected/")
        for name in window[-1]
        if name.startswith("rollout/rejected/")
    }
    return rejected_share(window, *(counted - {"no_signal", *REWARD_FAILURES, *AGENT_FAILURES}))


def share_of_reward_failures(window: Window, config: HealthConfig) -> float:
    calls = growth(window, "rewards/calls")
    failed = growth(window, "rewards/failed") / calls if calls > 0 else 0.0
    return max(failed, rejected_share(window, *REWARD_FAILURES))


def _mean_of_known(window: Window, name: str) -> float:
    """Return the mean of a metric over the steps that have it; 0 if none has."""
    known = [value for value in values(window, name) if not math.isnan(value)]
    return sum(known) / len(known) if known else 0.0


def _largest(window: Window, name: str) -> float:
    return max((value for value in values(window, name) if not math.isnan(value)), default=0.0)


BELOW_NEARLY_ALL = f"below {NEARLY_ALL:.0%}"
AT_MOST_LOST_SHARE = "at most {max_lost_share:.0%}"


REWARD_FAILURES = ("grading_failed", "tool_failed")
AGENT_FAILURES = ("agent_failed", "timeout_error")
"""Reasons for which groups are rejected: classes of errors, in snake case."""

CHECKS = (
    Check(
        "no_signal",
        ("trainer/groups_without_signal",),
        without_signal,
        "all samples of each group have the same reward, so that all advantages are zero",
        "choose easier or harder tasks (tasks.success_rate_above, tasks.success_rate_below), raise "
        "rollout.samples_per_group, and check the reward",
        measure=share_without_signal,
        healthy=BELOW_NEARLY_ALL,
    ),
    Check(
        "all_truncated",
        ("trainer/truncated_fraction",),
        lambda window, config: mean(window, "trainer/truncated_fraction") >= NEARLY_ALL,
        "answers are truncated",
        "raise engine.max_new_tokens; in multi-turn conversations, engine.max_prompt_tokens",
        measure=lambda window, config: _mean_of_known(window, "trainer/truncated_fraction"),
        healthy=BELOW_NEARLY_ALL,
    ),
    Check(
        "no_answers",
        ("trainer/no_answer_fraction",),
        lambda window, config: mean(window, "trainer/no_answer_fraction") >= NEARLY_ALL,
        "the verifier finds no answer in what the policy writes",
        "request the expected answer format with prompt.suffix (such as \\boxed{}), set "
        "rewards.accept_plain=true, or relax rewards.form",
        measure=lambda window, config: _mean_of_known(window, "trainer/no_answer_fraction"),
        healthy=BELOW_NEARLY_ALL,
    ),
    Check(
        "entropy_collapsed",
        ("trainer/entropy",),
        lambda window, config: always(
            window, "trainer/entropy", lambda entropy: entropy < config.min_entropy
        ),
        "the policy's entropy is below health.min_entropy: all samples of a prompt are alike",
        "resume from an earlier checkpoint and lower trainer.optimizer.learning_rate, or raise "
        "trainer.entropy_coef or trainer.loss.clip_eps_high",
        measure=lambda window, config: _largest(window, "trainer/entropy"),
        healthy="at least {min_entropy:g} nats",
        form=".3g",
    ),
    Check(
        "ratios_out_of_range",
        ("trainer/ratio",),
        ratios_out_of_range,
        (
            "mean importance ratios are further from 1 than health.max_ratio: the policy that "
            "samples differs from the policy that trains"
        ),
        (
            "lower trainer.optimizer.learning_rate or rollout.max_staleness, or set "
            "trainer.loss.importance_weighting.cap"
        ),
        measure=furthest_ratio,
        healthy="within a factor of {max_ratio:g} of 1",
        form=".4g",
    ),
    Check(
        "off_policy",
        ("trainer/sequence_ess",),
        lambda window, config: always(
            window, "trainer/sequence_ess", lambda share: share < config.min_sequence_ess
        ),
        (
            "the effective share of sequences is below health.min_sequence_ess: few samples decide "
            "each update, because the policy has moved far from the one that sampled them"
        ),
        "lower trainer.optimizer.learning_rate or rollout.max_staleness",
        measure=lambda window, config: _largest(window, "trainer/sequence_ess"),
        healthy="at least {min_sequence_ess:.0%}",
    ),
    Check(
        "stale_tokens",
        ("trainer/tokens_stale",),
        lambda window, config: stale_share(window, config) > config.max_lost_share,
        (
            "more than health.max_lost_share of the sampled tokens are older than "
            "rollout.max_staleness and are not trained on"
        ),
        "raise rollout.max_staleness, or lower rollout.max_running_groups or engine.max_new_tokens",
        measure=stale_share,
        healthy=AT_MOST_LOST_SHARE,
    ),
    Check(
        "no_gradient",
        (names.REWARD, names.LOSS),
        without_gradient,
        "no update changed the policy: its gradient is zero, not finite, or without tokens",
        "see the other findings; without any, check trainer.loss and trainer.advantages",
        measure=largest_gradient,
        healthy="above 0",
        form=".3g",
    ),
    Check(
        "tools_never_called",
        ("trainer/turns",),
        lambda window, config: always(window, "trainer/turns", lambda turns: turns <= 1.0),
        "no sample called a tool",
        (
            "set workflow.announce=true, set workflow.call_format to the format of the policy's "
            "training, or fine-tune it on tool calls"
        ),
        measure=lambda window, config: _largest(window, "trainer/turns"),
        healthy="above 1 turn",
        form=".3g",
        workflow="ToolUse",
    ),
    Check(
        "second_turns_never_taken",
        ("trainer/turns",),
        lambda window, config: (
            always(window, "trainer/turns", lambda turns: turns <= 1.0)
            and mean(window, "trainer/correct_fraction") < 1.0
        ),
        "no sample had a second turn, although answers were wrong",
        "raise engine.max_prompt_tokens: the second prompt contains the first answer and the "
        "feedback",
        measure=lambda window, config: _largest(window, "trainer/turns"),
        healthy="above 1 turn",
        form=".3g",
        workflow="MultiTurn",
    ),
    Check(
        "reward_failures",
        ("rollout/accepted",),
        lambda window, config: share_of_reward_failures(window, config) > config.max_lost_share,
        (
            "more than health.max_lost_share of the reward calls fail, or of the groups are "
            "rejected because a reward call or a tool fails"
        ),
        "see the log for the error; raise rewards.timeout_s or rewards.num_workers if it is slow",
        measure=share_of_reward_failures,
        healthy=AT_MOST_LOST_SHARE,
    ),
    Check(
        "agents_failing",
        ("rollout/accepted",),
        lambda window, config: rejected_share(window, *AGENT_FAILURES) > config.max_lost_share,
        (
            "more than health.max_lost_share of the groups are rejected because an agent fails or "
            "times out"
        ),
        "see the log for the error; raise engine.max_prompt_tokens if its calls do not fit, "
        "workflow.timeout_s if it is slow",
        measure=lambda window, config: rejected_share(window, *AGENT_FAILURES),
        healthy=AT_MOST_LOST_SHARE,
        workflow="Agent",
    ),
    Check(
        "groups_rejected",
        ("rollout/accepted",),
        lambda window, config: (
            share_rejected_for_other_reasons(window, config) > config.max_lost_share
        ),
        "more than health.max_lost_share of the groups are rejected",
        (
            "see rollout/rejected/* and the log for the reasons; prompts that do not fit need "
            "engine.max_prompt_tokens"
        ),
        measure=share_rejected_for_other_reasons,
        healthy=AT_MOST_LOST_SHARE,
    ),
)
"""All checks. Each reads a window of health.window_steps steps."""


def find(window: Window, config: HealthConfig, workflow: str) -> dict[str, bool]:
    """Run every check that applies to a window.

    Args:
        window: rows of metrics.
        config: thresholds.
        workflow: class of the run's workflow.

    Returns:
        Whether each check has a finding, by its name.
    """
    return {
        check.name: check.holds(window, config)
        for check in CHECKS
        if check.workflow in ("", workflow) and any(name in window[-1] for name in check.reads)
    }


def check_named(name: str) -> Check:
    """Return the check of that name."""
    return next(check for check in CHECKS if check.name == name)


class HealthMonitor:
    """Applies the checks to the steps of a run, in order. A resumed run begins with an empty
    window.
    """

    def __init__(self, config: HealthConfig, workflow: str, num_steps: int) -> None:
        """Create a monitor.

        Args:
            config: thresholds.
            workflow: class of the run's workflow.
            num_steps: steps of the run; they limit the window.
        """
        self._config, self._workflow = config, workflow
        self._rows = deque[Row](maxlen=1 + max(1, min(config.window_steps, num_steps)))
        self.active = dict[str, int]()
        """Active findings, each with its first step."""
        self.has_learnt = False
        """Whether any update had a gradient."""

    def update(self, step: int, row: Row) -> dict[str, float]:
        """Add the row of a step; return `health/NAME` for every check that applies."""
        if not self._rows:
            # Counters of a resumed run do not start at 0: its first row is their baseline.
            self._rows.append({} if step == 0 else row)
        self._rows.append(row)
        self.has_learnt = self.has_learnt or not without_gradient([{}, row], self._config)
        found = find(list(self._rows), self._config, self._workflow)
        if len(self._rows) < (self._rows.maxlen or 0):
            found = dict.fromkeys(found, False)
        self.active = {name: self.active.get(name, step) for name, holds in found.items() if holds}
        return {PREFIX + name: float(holds) for name, holds in found.items()}

    def changes(self, before: Mapping[str, int], step: int) -> Iterator[str]:
        """Yield a line for every finding that began or ended with a step.

        Args:
            before: `active` before the step.
            step: the step.
        """
        for name in (name for name in self.active if name not in before):
            check = check_named(name)
            yield f"health: {name} at step {step}: {check.meaning}; {check.remedy}"
        for name in (name for name in before if name not in self.active):
            yield f"health: {name} ended at step {step}; it began at step {before[name]}"
