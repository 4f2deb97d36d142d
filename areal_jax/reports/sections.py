"""Charts of a run's report, by section, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from areal_jax.metrics import names
from areal_jax.reports.series import OTHER_S, STEP_S, TOKEN_ESS, WAITING_S, WAITING_SHARE


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart."""

    metric: str
    """Name of the metric; a `*` stands for any text without `/`, one line for each."""
    label: str = ""
    """Label; `*` is what it stands for in the name. Empty: the metric's name."""
    spread: str = ""
    """Metric that is half the width of a band around the line, in multiples of `spread_factor`."""
    spread_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart, shown if a run has one of its metrics."""

    title: str
    lines: tuple[Line, ...]
    unit: str = ""
    note: str = ""
    smooth: bool = True
    stacked: bool = False
    log: bool = False
    zero: bool = False
    """Whether the axis begins at 0."""
    without: str = ""
    """Metric whose presence hides the chart."""


NORMAL_95 = 1.96
"""Half a 95 % interval of a normal distribution, in standard errors."""

LEARNING = (
    Chart(
        "Reward",
        (Line(names.REWARD, "mean reward", "trainer/reward_std"),),
        note="Mean of each step's samples; the band is one standard deviation of the samples.",
    ),
    Chart(
        "Components of the reward",
        (Line("trainer/reward/*", "*"),),
        note="Means of each step's samples, before weights and scale.",
    ),
    Chart(
        "Score on the evaluation set",
        (
            Line(names.PASS_AT_1, "pass@1", names.PASS_AT_1_ERROR, NORMAL_95),
            Line(names.ACCURACY, "accuracy on held-out pairs"),
        ),
        "share",
        "The band is a 95 % interval.",
        smooth=False,
    ),
    Chart(
        "Reward on the evaluation set",
        (Line(names.EVAL_REWARD, "mean reward", names.EVAL_REWARD_ERROR, NORMAL_95),),
        note="The band is a 95 % interval.",
        smooth=False,
    ),
    Chart("Loss", (Line(names.LOSS, "loss of the trained tokens"),), without=names.REWARD),
    Chart(
        "Held-out perplexity",
        (Line(names.PERPLEXITY, "perplexity"),),
        log=True,
        smooth=False,
    ),
    Chart(
        "Held-out loss",
        (Line(names.EVAL_LOSS, "loss"),),
        smooth=False,
    ),
    Chart(
        "Rewards of pairs",
        (
            Line("trainer/chosen_reward", "chosen"),
            Line("trainer/rejected_reward", "rejected"),
            Line("trainer/margin", "margin"),
        ),
    ),
    Chart(
        "Answers in training",
        (
            Line("trainer/correct_fraction", "correct"),
            Line("trainer/no_answer_fraction", "no answer found"),
        ),
        "share",
        zero=True,
    ),
    Chart(
        "Score by family of tasks",
        (Line("evaluation/family/*", "*"),),
        "share",
        smooth=False,
    ),
)

POLICY = (
    Chart("Entropy", (Line("trainer/entropy", "entropy per token"),), "nats"),
    Chart(
        "KL divergence",
        (
            Line("trainer/kl_behave_theta", "behaviour to trained policy"),
            Line("trainer/kl_proximal_theta", "proximal to trained policy"),
            Line("trainer/kl_reference", "policy to reference"),
            Line("trainer/kl_teacher", "policy to teacher"),
        ),
        "nats",
    ),
    Chart(
        "Clipped tokens",
        (
            Line("trainer/clip_fraction", "clip active"),
            Line("trainer/dual_clip_fraction", "dual clip active"),
            Line("trainer/behave_weight_capped_fraction", "importance weight capped"),
        ),
        "share",
        zero=True,
    ),
    Chart(
        "Importance weights",
        (
            Line("trainer/behave_weight", "mean weight proximal/behave"),
            Line("trainer/ratio", "mean ratio theta/proximal"),
            Line("trainer/behave_weight_p*", "weight, percentile *"),
        ),
    ),
    Chart(
        "Effective sample size",
        (
            Line("trainer/sequence_ess", "sequences"),
            Line(TOKEN_ESS, "tokens"),
        ),
        "share",
        "Share of the samples that as many unweighted ones would stand for: (Σw)² / (n Σw²).",
    ),
    Chart(
        "Distance from the sampling policy",
        (
            Line("trainer/log_ratio_rms", "all tokens"),
            Line("trainer/log_ratio_rms/age_*", "tokens of age *"),
        ),
        "nats",
        "Root mean square of log(proximal/behave).",
        zero=True,
    ),
    Chart(
        "Gradient norm",
        (
            Line(names.GRAD_NORM, "policy"),
            Line("trainer/value_grad_norm", "critic"),
        ),
        zero=True,
    ),
    Chart(
        "Length of answers",
        (
            Line("trainer/answer_tokens", "training"),
            Line("evaluation/answer_tokens", "evaluation"),
        ),
        "tokens",
    ),
    Chart(
        "Samples without use",
        (
            Line("trainer/truncated_fraction", "truncated samples"),
            Line("trainer/groups_without_signal", "groups with equal rewards"),
        ),
        "share",
        zero=True,
    ),
    Chart("Learning rate", (Line("trainer/learning_rate", "policy"),), smooth=False),
    Chart(
        "Critic",
        (Line("trainer/explained_variance", "explained variance"),),
    ),
)

TIME = (
    Chart(
        "Where a step's time goes",
        (
            Line(WAITING_S, "waiting for rollouts"),
            Line("trainer/seconds_packing", "packing"),
            Line("trainer/seconds_values", "critic"),
            Line("trainer/seconds_frozen", "reference and teacher"),
            Line("trainer/seconds_proximal", "proximal log-probs"),
            Line("trainer/seconds_update", "update"),
            Line("weights/publish_s", "weight sync"),
            Line(OTHER_S, "other, such as checkpoints"),
        ),
        "s",
        "Seconds from one step to the next, as the trainer spends them.",
        stacked=True,
    ),
    Chart(
        "Who waits for whom",
        (
            Line(WAITING_S, "trainer waits for rollouts"),
            Line("rollout/wait_s", "engines wait for requests"),
        ),
        "s",
        "Seconds of a step; those of all engines are added up.",
        zero=True,
    ),
    Chart(
        "Use of the devices",
        (
            Line("rollout/occupancy", "engine slots that sample"),
            Line("rollout/kv_used", "KV-cache pages in use"),
            Line("rollout/draft_acceptance", "verified drafts that are accepted"),
            Line(WAITING_SHARE, "trainer waits for rollouts"),
        ),
        "share",
        zero=True,
    ),
    Chart(
        "Throughput",
        (
            Line(names.ROLLOUT_TOKENS_PER_S, "rollout"),
            Line(names.TRAIN_TOKENS_PER_S, "trainer, with prompts"),
        ),
        "tokens/s",
        zero=True,
    ),
    Chart(
        "Groups",
        (
            Line("rollout/running", "in progress"),
            Line("rollout/buffered", "waiting for the trainer"),
        ),
        "groups",
        zero=True,
    ),
    Chart(
        "Weight sync",
        (
            Line("weights/delay_s", "published to delivered"),
            Line("weights/transfer_s", "transfer"),
            Line("weights/publish_s", "trainer's part"),
            Line("rollout/swap_stall_s", "engine stall"),
        ),
        "s",
        zero=True,
    ),
    Chart(
        "Evaluation",
        (Line("evaluation/seconds", "duration"),),
        "s",
        "Evaluations run beside training: their time is not part of the steps' time.",
        smooth=False,
        zero=True,
    ),
    Chart("Seconds per step", (Line(STEP_S, "step to step"),), "s", zero=True),
)

STALENESS = (
    Chart(
        "Staleness",
        (
            Line(names.STALENESS_MEAN, "mean"),
            Line(names.STALENESS_MAX, "largest"),
        ),
        "versions",
        zero=True,
        smooth=False,
    ),
)


def sections() -> dict[str, list[dict[str, Any]]]:
    """Return the charts of each section of the page."""
    return {
        name: [asdict(chart) for chart in charts]
        for name, charts in (
            ("learning", LEARNING),
            ("policy", POLICY),
            ("time", TIME),
            ("staleness", STALENESS),
        )
    }
