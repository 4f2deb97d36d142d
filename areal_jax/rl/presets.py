"""Algorithm presets: `algorithm=dapo` on the command line sets exactly the settings written here.

Settings that a preset does not name keep the experiment's values; other overrides on the command
line take precedence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_jax.rl.config import (
    CISPO,
    GAE,
    GSPO,
    M2PO,
    PPO,
    SAPO,
    Advantages,
    BatchNormalized,
    DecoupledPPO,
    GroupNormalized,
    KLInLoss,
    KLInReward,
    LeaveOneOut,
    Loss,
    Mean,
    Reference,
    Reinforce,
    Shaping,
)


@dataclass(frozen=True)
class Preset:
    """Source and settings of an algorithm."""

    paper: str
    loss: Loss = field(default_factory=DecoupledPPO)
    advantages: Advantages = field(default_factory=GroupNormalized)
    loss_mean: Mean = "tokens"
    shaping: Shaping = field(default_factory=Shaping)
    reference: Reference | None = None
    """A reference costs the memory of one more copy of the weights, and one more forward pass."""
    success_rate_above: float | None = None
    success_rate_below: float | None = None


PRESETS: dict[str, Preset] = {
    "areal": Preset("AReaL, arXiv:2505.24298, table 3", advantages=BatchNormalized()),
    "grpo": Preset(
        "GRPO, arXiv:2402.03300, equation 3; trainer.reference=none omits its KL to the initial "
        "policy, as is common today",
        loss_mean="sequences",
        reference=Reference(kl=KLInLoss(coefficient=0.04, estimator="k3")),
    ),
    "dr_grpo": Preset(
        "Dr.GRPO, arXiv:2503.20783",
        advantages=GroupNormalized(divide_by="nothing"),
        loss_mean="constant",
    ),
    "lite_ppo": Preset(
        "LitePPO, arXiv:2508.08221", advantages=GroupNormalized(divide_by="batch_std")
    ),
    # A completion is one action: the gradient of its log-prob sums over its tokens.
    "rloo": Preset(
        "RLOO, arXiv:2402.14740", loss=Reinforce(), advantages=LeaveOneOut(), loss_mean="constant"
    ),
    "reinforce_pp": Preset(
        "REINFORCE++, arXiv:2501.03262, with its coefficient for mathematics",
        advantages=BatchNormalized(),
        reference=Reference(kl=KLInReward(coefficient=0.001, estimator="k1")),
    ),
    "reinforce_pp_baseline": Preset(
        "REINFORCE++ with baseline, arXiv:2501.03262, with the coefficient of its authors' scripts "
        "(OpenRLHF)",
        advantages=GroupNormalized(divide_by="batch_std"),
        loss_mean="sequences",
        reference=Reference(kl=KLInLoss(coefficient=0.001, estimator="k2")),
    ),
    "ppo": Preset(
        "PPO, arXiv:1707.06347, undiscounted and with lambda 0.95 as in arXiv:2203.02155",
        loss=PPO(),
        advantages=GAE(),
    ),
    "ppo_no_critic": Preset(
        "PPO, arXiv:1707.06347, with GRPO's advantages instead of a critic's", loss=PPO()
    ),
    "gspo": Preset("GSPO, arXiv:2507.18071", loss=GSPO(), loss_mean="sequences"),
    "dapo": Preset(
        "DAPO, arXiv:2503.14476",
        loss=DecoupledPPO(clip_eps_high=0.28),
        shaping=Shaping(overlong_share=0.2),
        success_rate_above=0.0,
        success_rate_below=1.0,
    ),
    "sapo": Preset("SAPO, arXiv:2511.20347", loss=SAPO(), loss_mean="sequences"),
    "m2po": Preset("M2PO, arXiv:2510.01161", loss=M2PO()),
    "cispo": Preset("CISPO, arXiv:2506.13585", loss=CISPO()),
}
