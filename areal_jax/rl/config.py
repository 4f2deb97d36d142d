"""Settings of objectives, advantages and means: one choice per field, so that no two conflict.

The file has more than 400 lines because it lists every choice; each is a few fields.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import chz

from areal_jax.bounds import ABOVE_ONE, ANY_NUMBER, BELOW_HALF, FRACTION, NOT_NEGATIVE, POSITIVE

Proximal: TypeAlias = Literal["recompute", "interpolate", "behave"]
"""Source of the proximal policy's log-probs.

`recompute`: a forward pass over the batch before its first update. `interpolate`: between behave's
and theta's by the token's age, which saves that pass (A-3PO). `behave`: the behaviour policy's own,
so that nothing is decoupled.
"""

Level: TypeAlias = Literal["token", "sequence", "geometric"]
"""Level of the importance weight proximal/behave: per token, the product over the sequence, or the
geometric mean over the sequence."""


@chz.chz
class ImportanceWeighting:
    """Weight of tokens that another policy than the proximal one sampled."""


@chz.chz
class Unweighted(ImportanceWeighting):
    """Weight 1, as if the proximal policy had sampled every token."""


@chz.chz
class Weighted(ImportanceWeighting):
    """The importance weight proximal/behave (AReaL, arXiv:2505.24298, equation 5), computed by
    `importance_weights.behave_weight`.
    """

    level: Level = chz.field(
        default="token",
        doc="level of the weight: token, sequence (product) or geometric (mean over the sequence)",
    )


@chz.chz
class Truncated(ImportanceWeighting):
    """The importance weight, clipped to [`floor`, `cap`].

    Without a floor this is truncated importance sampling (TIS), with one clipped importance
    sampling (CIS).
    """

    cap: float = chz.field(validator=POSITIVE, doc="largest importance weight, a ratio above 0")
    floor: float = chz.field(
        validator=NOT_NEGATIVE, default=0.0, doc="smallest importance weight, a ratio; 0: no bound"
    )
    level: Level = chz.field(
        default="token",
        doc="level of the weight: token, sequence (product) or geometric (mean over the sequence)",
    )


@chz.chz
class Masked(ImportanceWeighting):
    """The importance weight; tokens outside [`floor`, `cap`] are masked, and the loss's denominator
    stays.

    With a floor this is IcePop (Ring-1T, arXiv:2510.18855: 0.5 and 5), at the level of sequences
    masked importance sampling (MIS; TRL: 3).
    """

    cap: float = chz.field(
        validator=POSITIVE, doc="importance weight above which a token is masked, a ratio above 0"
    )
    floor: float = chz.field(
        validator=NOT_NEGATIVE,
        default=0.0,
        doc="importance weight below which a token is masked, a ratio; 0: no bound",
    )
    level: Level = chz.field(
        default="token",
        doc="level of the weight: token, sequence (product) or geometric (mean over the sequence)",
    )


@chz.chz
class Rejection:
    """Tokens and sequences that are removed from the loss; its denominator stays.

    Independent of the importance weight. Every bound that is set holds; by default there is none.
    With w = proximal/behave, or theta/behave where the proximal policy is behave, and means over
    the loss tokens of a sequence:

    - `geometric_min`, `geometric_max`: exp(mean(log w)) of a sequence (Geo-RS);
    - `sequence_min`, `sequence_max`: the product of a sequence's w;
    - `k3_max`: mean(w - 1 - log w) of a sequence (K3-RS);
    - `binary_kl_max`: of a token, the larger KL between coins that show this token with
      the proximal and the behaviour probability (KPop, https://ringtech.notion.site/kpop);
    - `negative_log_ratio_max`: mean(log(behave/theta)) of a sequence whose advantage is negative
      (OPSM of DeepSeek-V3.2, arXiv:2512.02556).
    """

    geometric_min: float | None = chz.field(
        validator=POSITIVE,
        default=None,
        doc="smallest geometric mean of a sequence's importance weights (verl: 0.999); none: any",
    )
    geometric_max: float | None = chz.field(
        validator=POSITIVE,
        default=None,
        doc="largest geometric mean of a sequence's importance weights (verl: 1.001); none: any",
    )
    sequence_min: float | None = chz.field(
        validator=POSITIVE,
        default=None,
        doc="smallest product of a sequence's importance weights, a ratio; none: any",
    )
    sequence_max: float | None = chz.field(
        validator=POSITIVE,
        default=None,
        doc="largest product of a sequence's importance weights, a ratio; none: any",
    )
    k3_max: float | None = chz.field(
        validator=POSITIVE,
        default=None,
        doc="largest k3 estimate of a sequence's KL to behave, nats per token (verl: 0.01); none: "
        "any",
    )
    binary_kl_max: float | None = chz.field(
        validator=POSITIVE,
        default=None,
        doc="largest binary KL of a token between proximal and behave, in nats (KPop: 0.1); none: "
        "any",
    )
    negative_log_ratio_max: float | None = chz.field(
        validator=POSITIVE,
        default=None,
        doc="largest mean of log(behave/theta) over a sequence of negative advantage, in nats "
        "(OPSM); none: any",
    )


@chz.chz
class Loss:
    """A policy objective."""


@chz.chz
class ImportanceWeightedLoss(Loss, ABC):
    """An objective centred on the proximal policy, for tokens that an older policy may have
    sampled.
    """

    importance_weighting: ImportanceWeighting = chz.field(
        default_factory=Weighted, doc="importance weight of tokens that an older policy sampled"
    )
    rejection: Rejection = chz.field(
        default_factory=Rejection,
        doc="bounds that remove tokens and sequences from the loss, whatever their weight",
    )


@chz.chz
class ProximalLoss(ImportanceWeightedLoss, ABC):
    """An importance-weighted objective with a choice of proximal policy."""

    proximal: Proximal = chz.field(
        default="recompute",
        doc="log-probs of the proximal policy: recompute (a forward pass over the batch), "
        "interpolate (between behave and theta, by the token's age) or behave",
    )


@chz.chz
class DecoupledPPO(ProximalLoss):
    """Decoupled PPO (AReaL, arXiv:2505.24298, equation 5): clips around the policy just before the
    step.

    `behave_clip` adds a second clip around the policy that sampled the token, so that a token that
    is used for many steps does not move without a bound:
    min(u, 1 + clip_eps_high, c behave/proximal) A where A > 0, and
    max(u, 1 - clip_eps, behave/proximal / c) A where A < 0.
    """

    clip_eps: float = chz.field(
        validator=POSITIVE, default=0.2, doc="lower clip range of theta/proximal, a ratio"
    )
    clip_eps_high: float | None = chz.field(
        validator=POSITIVE, default=None, doc="upper clip range; none: as clip_eps (DAPO: 0.28)"
    )
    dual_clip: float | None = chz.field(
        validator=ABOVE_ONE,
        default=None,
        doc="dual clip: bound c > 1 on the loss of negative advantages; none: no bound",
    )
    behave_clip: float | None = chz.field(
        validator=ABOVE_ONE,
        default=None,
        doc="second clip: bound c > 1 on theta/behave (1/c where the advantage is negative); beyond"
        " it a token has no gradient; none: no bound",
    )


@chz.chz
class BehaveLoss(Loss, ABC):
    """An objective centred on the policy that sampled the tokens, without a proximal policy."""


@chz.chz
class DPPO(BehaveLoss):
    """DPPO (arXiv:2602.04879): the importance-weighted policy gradient of every token, except of
    those that have moved too far in the advantage's direction, measured in probability.

    With p = theta's probability of the token, q = behave's and r = p/q, the objective is
    keep r A - log_ratio_penalty log(r)². `tv` drops a token if (p - q) sign(A) > threshold; `kl` if
    q log(q/p) + (1-q) log((1-q)/(1-p)) > threshold and p - q has the sign of A. A ratio clip
    stops rare tokens too early and common ones too late; these bounds do not.
    """

    divergence: Literal["tv", "kl"] = chz.field(
        default="tv", doc="distance of a token's probability from behave's: tv or (binary) kl"
    )
    threshold: float = chz.field(
        validator=POSITIVE,
        default=0.2,
        doc="distance beyond which a token has no gradient, a probability, or nats for kl (0.05)",
    )
    log_ratio_penalty: float = chz.field(
        validator=NOT_NEGATIVE,
        default=0.0,
        doc="factor of log(theta/behave)², also of dropped tokens (prime-rl: 0.001); needs "
        "trainer.loss_mean=tokens",
    )


@chz.chz
class VESPO(BehaveLoss):
    """VESPO (arXiv:2602.10693): the policy gradient of every token, weighted by a smooth function
    of its sequence's importance weight.

    phi(W) A log theta with the constant phi(W) = W^k exp(lam (1 - W)) and W the product of
    theta/behave over the sequence. phi(1) = 1; small and large W vanish.
    """

    k_positive: float = chz.field(
        validator=POSITIVE, default=2.0, doc="exponent k for advantages of at least 0"
    )
    lam_positive: float = chz.field(
        validator=POSITIVE, default=3.0, doc="decay lambda for advantages of at least 0"
    )
    k_negative: float = chz.field(
        validator=POSITIVE, default=3.0, doc="exponent k for negative advantages"
    )
    lam_negative: float = chz.field(
        validator=POSITIVE, default=2.0, doc="decay lambda for negative advantages"
    )


@chz.chz
class PPO(BehaveLoss):
    """Plain PPO: clips around the policy that sampled the token."""

    clip_eps: float = chz.field(
        validator=POSITIVE, default=0.2, doc="lower clip range of theta/behave, a ratio"
    )
    clip_eps_high: float | None = chz.field(
        validator=POSITIVE, default=None, doc="upper clip range; none: as clip_eps"
    )
    dual_clip: float | None = chz.field(
        validator=ABOVE_ONE,
        default=None,
        doc="dual clip: bound c > 1 on the loss of negative advantages; none: no bound",
    )


@chz.chz
class M2POClip(BehaveLoss):
    """M2PO as its authors' code has it (arXiv:2510.01161): PPO that does not clip while the mean of
    log(theta/behave)² over the harmful tokens of a mini-batch, those that have moved in the
    advantage's direction, is below a bound; beyond, it clips at the largest of their log-ratios
    that keeps the mean of the clipped ones below it.

    Costs one more forward pass for each update, in which the bound is found.
    """

    max_second_moment: float = chz.field(
        validator=POSITIVE,
        default=0.04,
        doc="bound on the mean of log(theta/behave)² over the harmful tokens",
    )
    clip_min: float = chz.field(
        validator=FRACTION, default=0.7, doc="theta/behave above which nothing is clipped"
    )
    clip_max: float = chz.field(
        validator=ABOVE_ONE, default=1.5, doc="theta/behave below which nothing is clipped"
    )


@chz.chz
class GSPO(ProximalLoss):
    """GSPO (arXiv:2507.18071, equation 5): clips the sequence's ratio, the geometric mean of its
    tokens' ratios.
    """

    clip_eps: float = chz.field(
        validator=POSITIVE,
        default=3e-4,
        doc="lower clip range of the sequence's theta/proximal, a ratio",
    )
    clip_eps_high: float | None = chz.field(
        validator=POSITIVE, default=4e-4, doc="upper clip range; none: as clip_eps"
    )


@chz.chz
class GMPO(ProximalLoss):
    """GMPO (arXiv:2507.20673): the geometric mean of a sequence's ratios, each clipped.

    exp(mean(c)) A with c = min(log u, clip) where A > 0 and max(log u, -clip) elsewhere.
    """

    clip: float = chz.field(
        validator=POSITIVE,
        default=0.4,
        doc="bound on log(theta/proximal) of a token in the advantage's direction, in nats",
    )


@chz.chz
class SAPO(ProximalLoss):
    """SAPO (arXiv:2511.20347): a sigmoid around ratio 1 in place of the clip."""

    temperature_positive: float = chz.field(
        validator=POSITIVE, default=1.0, doc="temperature tau of the gate for positive advantages"
    )
    temperature_negative: float = chz.field(
        validator=POSITIVE,
        default=1.05,
        doc="temperature tau of the gate for advantages of at most 0",
    )


@chz.chz
class CISPO(ProximalLoss):
    """CISPO (arXiv:2506.13585, equation 4): the policy gradient of every token, weighted by its
    clipped ratio.

    The paper leaves the upper bound open. The default allows a weight of 5, as ScaleRL
    (arXiv:2510.13786), SkyRL and AReaL advise: a bound of 1.2, as in verl's script, is a PPO
    clip's, and shrinks the weight of the very tokens that CISPO means to keep.
    """

    clip_eps_low: float | None = chz.field(
        validator=POSITIVE, default=None, doc="lower clip range of the weight; none: no lower bound"
    )
    clip_eps_high: float = chz.field(
        validator=POSITIVE,
        default=4.0,
        doc="upper clip range of the weight, a ratio: the weight is at most 1 + this",
    )


@chz.chz
class M2PO(ImportanceWeightedLoss):
    """M2PO (arXiv:2510.01161): no clip; masks the tokens furthest from the policy that sampled
    them, until the mean of log(proximal/behave)² over the mini-batch is at most a bound.
    """

    max_second_moment: float = chz.field(
        validator=POSITIVE,
        default=0.04,
        doc="bound on the mean of log(proximal/behave)² over the tokens in the loss",
    )


@chz.chz
class Reinforce(ProximalLoss):
    """The policy gradient (REINFORCE), each token weighted by theta/proximal. No clip."""


@chz.chz
class OffPolicyReinforce(ImportanceWeightedLoss, BehaveLoss):
    """The policy gradient without a proximal policy: w A log(theta), where the importance weight
    and the rejection read theta/behave, without gradient (verl's bypass mode with loss_type
    reinforce).

    Unlike `Reinforce`, its weight can be truncated at the level of tokens or sequences.
    """


@chz.chz
class CustomLoss(ProximalLoss, ABC):
    """A user-defined objective: a subclass that defines `gain` (see
    experiments/own_objective.py).
    """

    @abstractmethod
    def gain(self, ratio: Any, advantages: Any, logp: Any) -> Any:
        """Return each token's contribution to the objective, which is maximised.

        Args:
            ratio: theta/proximal of every token.
            advantages: advantage of every token.
            logp: log theta of every token.

        Returns:
            An array of the arguments' shape, proportional to `advantages`.
        """


@chz.chz
class Shaping:
    """Reward shaping before advantages are computed; by default none."""

    bias: float = chz.field(validator=ANY_NUMBER, default=0.0, doc="offset added to every reward")
    scale: float = chz.field(
        validator=ANY_NUMBER, default=1.0, doc="factor of the reward, after the bias"
    )
    clip: float | None = chz.field(
        validator=POSITIVE,
        default=None,
        doc="largest absolute reward, after the scale; none: no bound",
    )
    overlong_share: float = chz.field(
        validator=FRACTION,
        default=0.0,
        doc=(
            "final share of engine.max_new_tokens in which the reward decreases linearly with "
            "every token (DAPO: 0.2); 0: none"
        ),
    )
    overlong_penalty: float = chz.field(
        validator=NOT_NEGATIVE,
        default=5.0,
        doc="overlong penalty of an answer of engine.max_new_tokens tokens",
    )


@chz.chz
class Advantages:
    """An advantage estimator."""


@chz.chz
class GroupNormalized(Advantages):
    """GRPO: (reward - mean of its group) / (standard deviation + eps), the same on every token."""

    divide_by: Literal["group_std", "batch_std", "nothing"] = chz.field(
        default="group_std",
        doc="divisor of the centred reward: group_std, of the group's rewards (GRPO); batch_std, "
        "of "
        "the batch's rewards centred by group (LitePPO, REINFORCE++ with baseline); nothing "
        "(Dr.GRPO)",
    )
    eps: float = chz.field(
        validator=POSITIVE, default=1e-6, doc="added to the standard deviation, in units of reward"
    )


@chz.chz
class CustomAdvantages(Advantages, ABC):
    """An estimator of the user's own: a subclass that defines `of_group`."""

    @abstractmethod
    def of_group(self, rewards: Any) -> Any:
        """Return the advantage of each sample of a group, which all of its tokens get.

        Args:
            rewards: shaped rewards of the group's samples, a numpy array of float64.

        Returns:
            A finite array of the same shape.
        """


@chz.chz
class LeaveOneOut(Advantages):
    """RLOO (arXiv:2402.14740): reward - mean of the other rewards of its group, the same on every
    token.
    """


@chz.chz
class MaxRL(Advantages):
    """MaxRL (arXiv:2602.02710): (reward - mean of its group) / mean, the same on every token; 0 if
    the mean is 0.

    A correct answer to a hard problem weighs more, as in the gradient of log(success rate). Rewards
    are 0 or more (`rewards.wrong=0`) and not shaped: a negative mean turns every sign around, and a
    mean near 0 has no bound.
    """


@chz.chz
class VCPO(Advantages):
    """VCPO (arXiv:2602.17616): reward - the baseline of least variance of its group, divided by the
    standard deviation of its group; the same on every token.

    The baseline is sum(W² g² r) / sum(W² g²), where W is the untruncated weight theta/behave of a
    sample and g the norm of the gradient of its log-prob, both before the first update of the step.
    It costs one forward and backward pass, more where several samples share a row.
    """

    divide_by: Literal["group_std", "nothing"] = chz.field(
        default="group_std", doc="divisor: standard deviation of the group, or nothing"
    )
    eps: float = chz.field(
        validator=POSITIVE, default=1e-8, doc="added to the standard deviation, in units of reward"
    )


def component_weights(weights: Iterable[str]) -> dict[str, float]:
    """Return the weights of components of the reward, given as NAME:WEIGHT.

    Raises:
        ValueError: One is written differently.
    """
    found = dict[str, float]()
    for each in weights:
        name, _, weight = each.rpartition(":")
        try:
            found[name] = float(weight)
        except ValueError:
            found.pop(name, None)
        if not name or not math.isfinite(found.get(name, math.nan)):
            raise ValueError(f"expected NAME:WEIGHT, such as format:0.5, found {each!r}")
    return found


def _has_component_weights(record: Any, name: str) -> None:
    component_weights(getattr(record, name))


@chz.chz
class GDPO(Advantages):
    """GDPO (arXiv:2601.05242): each named component of the reward is normalised in its group, then
    their weighted sum over the batch. Otherwise different components would often give one sum.

    `rewards.function` returns a dict of components. Rewards are not shaped.
    """

    weights: tuple[str, ...] = chz.field(
        default=(),
        doc="comma-separated weights of components, such as correct:1,format:0.5; a component "
        "that is not listed has weight 1",
        validator=_has_component_weights,
    )
    over: Literal["sequences", "tokens"] = chz.field(
        default="sequences",
        doc="what the sum is normalised over: the samples of the batch, or their loss tokens",
    )
    eps: float = chz.field(
        validator=POSITIVE, default=1e-6, doc="added to standard deviations, in units of reward"
    )


@chz.chz
class SPO(Advantages):
    """SPO (arXiv:2509.13232): reward - tracked success rate of its prompt, normalised over the
    samples of the batch; one sample per group is enough.

    The rate is successes / (successes + failures). After each step the past counts
    2^(-change / half_change) of what it did, where change is how far the log-probs of the prompt's
    last answer have moved since. Rewards are between 0 and 1 (`rewards.wrong=0`) and not shaped.
    """

    half_change: float = chz.field(
        validator=POSITIVE,
        default=0.06,
        doc="mean absolute change of the log-probs of a prompt's last answer, in nats, with which "
        "the past counts half",
    )
    decay_min: float = chz.field(
        validator=FRACTION, default=0.875, doc="smallest weight of the past after a step"
    )
    decay_max: float = chz.field(
        validator=FRACTION, default=0.96, doc="largest weight of the past after a step"
    )
    prior_successes: float = chz.field(
        validator=POSITIVE, default=0.5, doc="successes of a prompt before its first sample"
    )
    prior_failures: float = chz.field(
        validator=POSITIVE, default=0.5, doc="failures of a prompt before its first sample"
    )
    eps: float = chz.field(
        validator=POSITIVE, default=1e-6, doc="added to the standard deviation, in units of reward"
    )


@chz.chz
class BatchNormalized(Advantages):
    """AReaL: the reward on every token, normalised over all loss tokens of the batch
    (arXiv:2505.24298, section 5.1 and table 3).
    """

    eps: float = chz.field(
        validator=POSITIVE, default=1e-5, doc="added to the standard deviation, in units of reward"
    )


@chz.chz
class Unnormalized(Advantages):
    """The reward itself on every token."""


@chz.chz
class GAE(Advantages):
    """Generalized advantage estimation (arXiv:1506.02438) with a critic that trains beside the
    policy.

    The critic's value is the baseline, so one sample per group is enough.
    """

    gamma: float = chz.field(
        validator=FRACTION, default=1.0, doc="discount per token (gamma), from 0 to 1"
    )
    lam: float = chz.field(
        validator=FRACTION,
        default=0.95,
        doc="lambda of GAE: 0 uses the critic's next value only, 1 the whole return",
    )
    length_alpha: float | None = chz.field(
        validator=POSITIVE,
        default=None,
        doc="lambda by length in place of lam: max(0, 1 - 1 / (length_alpha · sampled tokens of "
        "the answer)) (VAPO: 0.05); none: lam",
    )
    critic_lam: float | None = chz.field(
        validator=FRACTION,
        default=None,
        doc="lambda of the critic's targets (VC-PPO: 1); none: as the advantages'",
    )
    step: Literal["token", "turn"] = chz.field(
        default="token",
        doc="step of the decision process: each sampled token, or each turn, a stretch of sampled "
        "tokens, all of which get the turn's advantage and return",
    )
    normalize: bool = chz.field(
        default=True,
        doc="normalisation of advantages over the batch's loss tokens: mean 0, deviation 1",
    )
    eps: float = chz.field(
        validator=POSITIVE, default=1e-5, doc="added to the standard deviation, in units of reward"
    )


Estimator: TypeAlias = Literal["k1", "k2", "k3"]
"""Estimator of KL(policy || reference) from x = log(policy/reference) of a sampled token: x, x²/2,
or exp(-x) - 1 + x."""


@chz.chz
class KL:
    """A penalty on the KL to a reference policy."""


@chz.chz
class KLInReward(KL):
    """Subtracts coefficient · estimate from every token's reward, and so from the advantages of
    that token and of all before it.

    The estimate is of the behaviour policy and carries no gradient, so that every estimator is
    valid here.
    """

    coefficient: float = chz.field(
        validator=NOT_NEGATIVE, default=0.001, doc="KL penalty, in units of reward per nat"
    )
    estimator: Estimator = chz.field(
        default="k1",
        doc="KL estimator: k1: log-ratio, k2: half its square, k3: exp(-log-ratio) - 1 + log-ratio",
    )


@chz.chz
class KLInLoss(KL):
    """Adds coefficient · estimate of the policy being trained to every token's loss (GRPO,
    arXiv:2402.03300, equation 3).

    On the policy's own samples the gradient of k2 is that of KL(policy || reference), and the
    gradient of k3 that of KL(reference || policy). The gradient of k1 is zero in expectation for
    any reference, which is why k1 is not offered.
    """

    coefficient: float = chz.field(
        validator=NOT_NEGATIVE,
        default=0.04,
        doc="KL penalty, in units of advantage per nat (GRPO: 0.04)",
    )
    estimator: Literal["k2", "k3"] = chz.field(
        default="k3",
        doc="KL estimator: k2: half the squared log-ratio; k3: exp(-log-ratio) - 1 + log-ratio",
    )


@chz.chz
class Reference:
    """A frozen policy, the KL to which is penalised."""

    path: str = chz.field(
        default="initial",
        doc=(
            "'initial' (the weights that training starts from), or the path of a policy with the "
            "same tokenizer, as in policy.path"
        ),
    )
    offload: bool = chz.field(
        default=False,
        doc="weights in host memory between steps; saves device memory, each step waits for a copy",
    )
    kl: KL = chz.field(default_factory=KLInLoss, doc="KL penalty: KLInReward or KLInLoss")


@chz.chz
class Distillation:
    """How the trained policy learns from a teacher's predictions of its samples."""


@chz.chz
class TeacherAdvantage(Distillation):
    """log(teacher/behave) of every sampled token is added to its advantage, so that the objective
    with its clip minimizes the reverse KL (arXiv:2306.08543).
    """


@chz.chz
class SampledTokens(Distillation):
    """log(teacher/theta) of every sampled token times theta/behave, maximized outside of the
    objective (SDFT, arXiv:2601.19897, as prime-rl has it).
    """

    max_probability_drop: float = chz.field(
        validator=POSITIVE,
        default=0.2,
        doc="tokens that theta samples with a probability lower than behave's by more than this "
        "are not learned from",
    )
    drift_coef: float = chz.field(
        validator=NOT_NEGATIVE, default=1e-3, doc="factor of the squared log(theta/behave)"
    )


@chz.chz
class JensenShannon(Distillation):
    """Generalized Jensen-Shannon divergence of teacher and policy over the teacher's most likely
    tokens (GKD, arXiv:2306.13649; on-policy self-distillation as TRL has it).
    """

    alpha: float = chz.field(
        validator=FRACTION,
        default=0.5,
        doc="weight of the teacher in the mixture; 0: KL(teacher || policy), 1: KL(policy || "
        "teacher)",
    )
    num_tokens: int = chz.field(
        validator=POSITIVE,
        default=100,
        doc="number of the teacher's most likely tokens over which both are normalized",
    )
    max_ratio: float = chz.field(
        validator=POSITIVE,
        default=2.0,
        doc="largest theta/behave, by which the divergence is multiplied",
    )


@chz.chz
class CrossTokenizer(Distillation):
    """Distillation of a teacher with another tokenizer (GOLD: universal logit distillation,
    arXiv:2402.12030, with a Jensen-Shannon divergence over tokens that both have).
    """

    alpha: float = chz.field(
        validator=FRACTION,
        default=0.5,
        doc="as in JensenShannon, over the tokens that both tokenizers have",
    )
    num_tokens: int = chz.field(
        validator=POSITIVE,
        default=100,
        doc="number of most likely tokens that are compared",
    )
    shared_weight: float | None = chz.field(
        validator=FRACTION,
        default=None,
        doc="weight of the divergence over shared tokens; the distance of sorted probabilities of "
        "the others has the rest; none: the shared fraction of the teacher's vocabulary",
    )


@chz.chz
class Teacher:
    """A policy whose predictions of the sampled tokens are distilled into the trained policy
    (on-policy distillation).
    """

    path: str = chz.field(
        doc="path of a policy, as in policy.path, such as RUN/policy of a finished run; 'initial' "
        "(the weights that training starts from) or 'current' (the trained policy itself), each "
        "with a hint. Its tokenizer must be the policy's, unless distillation=CrossTokenizer"
    )
    distillation: Distillation = chz.field(
        default_factory=TeacherAdvantage,
        doc="TeacherAdvantage, SampledTokens, JensenShannon or CrossTokenizer",
    )
    hint: str | None = chz.field(
        default=None,
        doc="system message that only the teacher reads, in which {answer} is the task's reference "
        "answer (self-distillation); none: the teacher reads the policy's prompt",
    )
    row_tokens: int = chz.field(
        validator=NOT_NEGATIVE,
        default=0,
        doc="tokens of the teacher's packed rows. It reads no more of a sample, and nothing is "
        "distilled from the rest; 0: as the trainer's",
    )
    weight: float = chz.field(
        validator=NOT_NEGATIVE,
        default=1.0,
        doc="factor of the distillation: of log(teacher/behave), the per-token reverse KL, in "
        "advantages, or of its own term in the loss",
    )
    reward_weight: float = chz.field(
        validator=NOT_NEGATIVE,
        default=1.0,
        doc="factor of the advantages computed from rewards; 0: distillation only",
    )
    offload: bool = chz.field(
        default=False,
        doc="weights in host memory between steps; saves device memory, each step waits for a copy",
    )


Mean: TypeAlias = Literal["tokens", "sequences", "constant"]
"""Aggregation of a mini-batch's loss.

`tokens`: mean over all tokens (DAPO, AReaL). `sequences`: mean over sequences of the mean over
their tokens (GRPO, GSPO). `constant`: mean over sequences of the sum over their tokens, divided by
a constant length (Dr.GRPO).
"""


@chz.chz
class Preference:
    """An objective on pairs of a chosen and a rejected answer to the same prompt."""


@chz.chz
class DPO(Preference):
    """DPO (arXiv:2305.18290, equation 7): the reward of an answer is beta log(policy/reference)."""

    beta: float = chz.field(
        validator=POSITIVE,
        default=0.1,
        doc="reward per nat of log(policy/reference); lower values allow a larger KL to the "
        "reference",
    )
    label_smoothing: float = chz.field(
        validator=BELOW_HALF,
        default=0.0,
        doc="assumed share of pairs with swapped labels, below 0.5 (conservative DPO)",
    )


@chz.chz
class IPO(Preference):
    """IPO (arXiv:2310.12036, equation 17), in nats per token: regresses the margin to
    1 / (2 beta).
    """

    beta: float = chz.field(
        validator=POSITIVE,
        default=0.1,
        doc="inverse of the target margin, which is 1 / (2 beta) nats per token; lower values "
        "allow "
        "a larger KL to the reference",
    )


@chz.chz
class BradleyTerry(Preference):
    """A reward model instead of a policy: scores whole answers, the chosen one above the rejected
    one.
    """
