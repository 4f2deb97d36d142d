"""Which objective and which advantages: one choice per field, so that no two switches can fight."""

from __future__ import annotations

from typing import Literal

import chz


@chz.chz
class Loss:
    """A policy objective."""


@chz.chz
class DecoupledPPO(Loss):
    """Decoupled PPO (AReaL, arXiv:2505.24298, equation 5): the clip is centred on the policy just before the step."""

    clip_eps: float = chz.field(default=0.2, doc="lower clip range of theta/proximal, a ratio")
    clip_eps_high: float | None = chz.field(default=None, doc="upper clip range; none: as clip_eps (DAPO: 0.28)")
    dual_clip: float | None = chz.field(default=None, doc="bound c > 1 on the loss of negative advantages; none: no bound")
    behave_weight_cap: float | None = chz.field(default=None, doc="cap on proximal/behave; none: no cap")
    behave_weight_mode: Literal["mask", "clamp"] = chz.field(
        default="mask", doc="what happens above the cap: the token leaves the loss, or its weight becomes the cap"
    )


@chz.chz
class PPO(Loss):
    """Plain PPO: the clip is centred on the policy that sampled the token."""

    clip_eps: float = chz.field(default=0.2, doc="lower clip range of theta/behave, a ratio")
    clip_eps_high: float | None = chz.field(default=None, doc="upper clip range; none: as clip_eps")
    dual_clip: float | None = chz.field(default=None, doc="bound c > 1 on the loss of negative advantages; none: no bound")


@chz.chz
class Advantages:
    """How rewards become advantages."""


@chz.chz
class GroupNormalized(Advantages):
    """GRPO: (reward - mean of its group) / (standard deviation of its group + eps), the same on every token."""

    divide_by_std: bool = chz.field(default=True, doc="false: only the group's mean is subtracted (Dr.GRPO)")
    eps: float = chz.field(default=1e-6, doc="added to the standard deviation, in units of reward")


@chz.chz
class BatchNormalized(Advantages):
    """The paper's: the reward on every token, normalised over all loss tokens of the batch (section 5.1 and table 3)."""

    eps: float = chz.field(default=1e-5, doc="added to the standard deviation, in units of reward")
