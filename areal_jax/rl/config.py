"""Which objective, which advantages and which mean: one choice per field, so that no two switches
can fight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, TypeAlias

import chz

Proximal: TypeAlias = Literal["recompute", "interpolate", "behave"]
"""Whence the log-probabilities of the proximal policy come: a forward pass over the batch before
its first update; a line from behave's to theta's, by how old the token is, which saves that pass
(A-3PO); behave itself, so that nothing is decoupled."""

Level: TypeAlias = Literal["token", "sequence", "geometric"]
"""Of an importance weight proximal/behave: each token's own, the product over its sequence, or the
geometric mean of that."""


@chz.chz
class ImportanceWeighting:
    """How a token sampled by another policy than the proximal one is weighted."""


@chz.chz
class Unweighted(ImportanceWeighting):
    """Weight 1: as if the proximal policy had sampled every token."""


@chz.chz
class Weighted(ImportanceWeighting):
    """The importance weight proximal/behave as it stands (AReaL, arXiv:2505.24298, equation 5)."""

    level: Level = chz.field(
        default="token",
        doc="whose weight: token, sequence (product) or geometric (its mean per token)",
    )


@chz.chz
class Truncated(ImportanceWeighting):
    """The weight, cut down to `cap` where it is above."""

    cap: float = chz.field(doc="highest weight, a ratio above 0")
    level: Level = chz.field(
        default="token",
        doc="whose weight: token, sequence (product) or geometric (its mean per token)",
    )


@chz.chz
class Masked(ImportanceWeighting):
    """The weight; what has one above `cap` leaves the loss, whose denominator stays."""

    cap: float = chz.field(doc="highest weight that is trained on, a ratio above 0")
    level: Level = chz.field(
        default="token",
        doc="whose weight: token, sequence (product) or geometric (its mean per token)",
    )


@chz.chz
class Loss:
    """A policy objective."""


@chz.chz
class ImportanceWeightedLoss(Loss, ABC):
    """An objective centred on the proximal policy, for tokens that an older one may have
    sampled."""

    importance_weighting: ImportanceWeighting = chz.field(
        default_factory=Weighted, doc="importance weight of tokens that an older policy drew"
    )


@chz.chz
class ProximalLoss(ImportanceWeightedLoss, ABC):
    """A corrected objective that takes its proximal policy from anywhere."""

    proximal: Proximal = chz.field(
        default="recompute",
        doc="log-probs of the proximal policy: recompute (a forward pass over the batch), "
        "interpolate (between behave and "
        "theta, by the token's age) or behave",
    )


@chz.chz
class DecoupledPPO(ProximalLoss):
    """Decoupled PPO (AReaL, arXiv:2505.24298, equation 5): the clip is centred on the policy just
    before the step."""

    clip_eps: float = chz.field(default=0.2, doc="lower clip range of theta/proximal, a ratio")
    clip_eps_high: float | None = chz.field(
        default=None, doc="upper clip range; none: as clip_eps (DAPO: 0.28)"
    )
    dual_clip: float | None = chz.field(
        default=None, doc="bound c > 1 on the loss of negative advantages; none: no bound"
    )


@chz.chz
class PPO(Loss):
    """Plain PPO: the clip is centred on the policy that sampled the token."""

    clip_eps: float = chz.field(default=0.2, doc="lower clip range of theta/behave, a ratio")
    clip_eps_high: float | None = chz.field(default=None, doc="upper clip range; none: as clip_eps")
    dual_clip: float | None = chz.field(
        default=None, doc="bound c > 1 on the loss of negative advantages; none: no bound"
    )


@chz.chz
class GSPO(ProximalLoss):
    """GSPO (arXiv:2507.18071, equation 5): ratio and clip are those of the sequence, the geometric
    mean of its tokens'."""

    clip_eps: float = chz.field(
        default=3e-4, doc="lower clip range of the sequence's theta/proximal, a ratio"
    )
    clip_eps_high: float | None = chz.field(default=4e-4, doc="upper clip range; none: as clip_eps")


@chz.chz
class SAPO(ProximalLoss):
    """SAPO (arXiv:2511.20347): a sigmoid around ratio 1 in place of the clip."""

    temperature_positive: float = chz.field(
        default=1.0, doc="steepness of the gate where the advantage is positive"
    )
    temperature_negative: float = chz.field(
        default=1.05, doc="steepness of the gate where the advantage is not positive"
    )


@chz.chz
class CISPO(ProximalLoss):
    """CISPO (arXiv:2506.13585, equation 4): the policy gradient of every token, its ratio clipped
    as a mere weight."""

    clip_eps_low: float | None = chz.field(
        default=None, doc="lower clip range of the weight; none: no lower bound"
    )
    clip_eps_high: float = chz.field(default=0.2, doc="upper clip range of the weight, a ratio")


@chz.chz
class M2PO(ImportanceWeightedLoss):
    """M2PO (arXiv:2510.01161): no clip; instead the tokens furthest from the policy that drew them
    leave the loss, until the mean of log(proximal/behave)² over the mini-batch is at most a
    bound."""

    max_second_moment: float = chz.field(
        default=0.04, doc="bound on the mean of log(proximal/behave)² over what is kept"
    )


@chz.chz
class Reinforce(ProximalLoss):
    """The policy gradient (REINFORCE), each token weighted by how likely the policy still is to
    draw it. No clip."""


@chz.chz
class CustomLoss(ProximalLoss, ABC):
    """An objective of your own: a subclass in the experiment's file that defines `gain` (see
    experiments/own_objective.py)."""

    @abstractmethod
    def gain(self, ratio: Any, advantages: Any, logp: Any) -> Any:
        """What each token adds to the objective, which is maximised: an array like the arguments,
        proportional to `advantages`.

        Args:
            ratio: theta/proximal of every token.
            logp: log theta of every token.
        """


@chz.chz
class Shaping:
    """What becomes of rewards before advantages are made of them; by default nothing."""

    bias: float = chz.field(default=0.0, doc="added to every reward")
    scale: float = chz.field(default=1.0, doc="then multiplies it")
    clip: float | None = chz.field(default=None, doc="then bounds its size; none: no bound")
    overlong_share: float = chz.field(
        default=0.0,
        doc=(
            "last share of engine.max_new_tokens in which an answer loses reward with every "
            "token (DAPO: 0.2); 0: none"
        ),
    )
    overlong_penalty: float = chz.field(
        default=5.0, doc="reward lost by an answer of engine.max_new_tokens"
    )


@chz.chz
class Advantages:
    """How rewards become advantages."""


@chz.chz
class GroupNormalized(Advantages):
    """GRPO: (reward - mean of its group) / (standard deviation + eps), the same on every token."""

    divide_by: Literal["group_std", "batch_std", "nothing"] = chz.field(
        default="group_std",
        doc="group_std: of its own group's rewards (GRPO); batch_std: of the batch's, centred by "
        "group (LitePPO, REINFORCE++ "
        "with baseline); nothing: only the mean is subtracted (Dr.GRPO)",
    )
    eps: float = chz.field(default=1e-6, doc="added to the standard deviation, in units of reward")


@chz.chz
class LeaveOneOut(Advantages):
    """RLOO (arXiv:2402.14740): reward - mean of the other rewards of its group, the same on every
    token."""


@chz.chz
class BatchNormalized(Advantages):
    """The paper's: the reward on every token, normalised over all loss tokens of the batch (section
    5.1 and table 3)."""

    eps: float = chz.field(default=1e-5, doc="added to the standard deviation, in units of reward")


@chz.chz
class Unnormalized(Advantages):
    """The reward itself on every token."""


@chz.chz
class GAE(Advantages):
    """Generalized advantage estimation (arXiv:1506.02438) by a critic, token by token, which trains
    beside the policy.

    The value of a state replaces what other samples of the group say, so one sample a group is
    enough."""

    gamma: float = chz.field(default=1.0, doc="what a reward is worth a token earlier, from 0 to 1")
    lam: float = chz.field(
        default=0.95,
        doc=(
            "how far the advantage looks beyond the critic's next value: 0 not at all, 1 to the "
            "end (lambda)"
        ),
    )
    normalize: bool = chz.field(
        default=True,
        doc="then subtract the mean over the batch's loss tokens and divide by their deviation",
    )
    eps: float = chz.field(default=1e-5, doc="added to the standard deviation, in units of reward")


Estimator: TypeAlias = Literal["k1", "k2", "k3"]
"""Of KL(policy || reference), from x = log(policy/reference) of a sampled token: x, x²/2, or
exp(-x) - 1 + x."""


@chz.chz
class KL:
    """How straying from a reference policy is paid for."""


@chz.chz
class KLInReward(KL):
    """Every token pays coefficient · estimate, found where the policy that drew it strays, and the
    advantages of all tokens before it bear that. What it is made of carries no gradient, so that
    every estimator is sound here."""

    coefficient: float = chz.field(default=0.001, doc="what a nat of KL costs, in units of reward")
    estimator: Estimator = chz.field(
        default="k1", doc="k1: log-ratio, k2: half its square, k3: exp(-log-ratio) - 1 + log-ratio"
    )


@chz.chz
class KLInLoss(KL):
    """coefficient · estimate of the policy being trained joins every token's loss (GRPO,
    arXiv:2402.03300, equation 3).

    On tokens of the policy itself k2's gradient is that of KL(policy || reference), k3's that of
    KL(reference || policy), and k1's zero on average whatever the reference: noise alone, which is
    why k1 is no choice here."""

    coefficient: float = chz.field(
        default=0.04, doc="what a nat of KL costs, in units of advantage (GRPO: 0.04)"
    )
    estimator: Literal["k2", "k3"] = chz.field(
        default="k3", doc="k2: half the log-ratio squared; k3: exp(-log-ratio) - 1 + log-ratio"
    )


@chz.chz
class Reference:
    """A frozen policy that the trained one is not to stray from."""

    path: str = chz.field(
        default="initial",
        doc=(
            "'initial' (the weights that training starts from), or as policy.path a policy with "
            "the same tokens"
        ),
    )
    offload: bool = chz.field(
        default=False,
        doc="keep it in the host's memory while it is not asked; each step then waits for it",
    )
    kl: KL = chz.field(
        default_factory=KLInLoss, doc="how straying is paid for: KLInReward or KLInLoss"
    )


@chz.chz
class Teacher:
    """A frozen policy that says of every token the trained one draws how it would have liked it
    (on-policy distillation)."""

    path: str = chz.field(
        doc="as policy.path, a policy with the same tokens, such as RUN/policy of a finished run"
    )
    weight: float = chz.field(
        default=1.0,
        doc=(
            "every token's advantage gains this times log(teacher/behave): the reverse KL, token "
            "by token"
        ),
    )
    reward_weight: float = chz.field(
        default=1.0,
        doc="multiplies the advantages made of rewards; 0: learn from the teacher alone",
    )
    offload: bool = chz.field(
        default=False,
        doc="keep it in the host's memory while it is not asked; each step then waits for it",
    )


Mean: TypeAlias = Literal["tokens", "sequences", "constant"]
"""What a mini-batch's loss is the mean of: all its tokens (DAPO, the paper), its sequences, each
the mean of its tokens (GRPO, GSPO), or its sequences, each the sum of its tokens over a constant
length (Dr.GRPO)."""


@chz.chz
class Preference:
    """What is learnt from a chosen and a rejected answer to the same prompt."""


@chz.chz
class DPO(Preference):
    """DPO (arXiv:2305.18290, equation 7): how much more likely than under the reference each whole
    answer has become."""

    beta: float = chz.field(
        default=0.1,
        doc="reward of an answer for each nat; the lower, the further from the reference",
    )
    label_smoothing: float = chz.field(
        default=0.0,
        doc=(
            "share of the pairs, below a half, that are taken to be labelled the wrong way round "
            "(conservative DPO)"
        ),
    )


@chz.chz
class IPO(Preference):
    """IPO (arXiv:2310.12036, equation 17), of nats per token: a margin of 1 / (2 beta), and no
    more."""

    beta: float = chz.field(
        default=0.1,
        doc="the lower, the further from the reference: 1 / (2 beta) nats per token between answers",
    )


@chz.chz
class BradleyTerry(Preference):
    """A reward model instead of a policy: a score of each whole answer, the chosen one's above the
    other's."""
