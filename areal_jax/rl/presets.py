"""Algorithm presets: `algorithm=dapo` on the command line sets exactly the settings written here.

Settings that a preset does not name keep the experiment's values; other overrides on the command
line take precedence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_jax.rl.config import (
    CISPO,
    DPPO,
    GAE,
    GDPO,
    GMPO,
    GSPO,
    M2PO,
    PPO,
    SAPO,
    SPO,
    VCPO,
    VESPO,
    Advantages,
    BatchNormalized,
    DecoupledPPO,
    GroupNormalized,
    KLInLoss,
    KLInReward,
    LeaveOneOut,
    Loss,
    M2POClip,
    Masked,
    MaxRL,
    Mean,
    OffPolicyReinforce,
    Reference,
    Reinforce,
    Rejection,
    Shaping,
    Truncated,
    Unweighted,
)


@dataclass(frozen=True)
class Preset:
    """Source and settings of an algorithm."""

    paper: str
    loss: Loss = field(default_factory=DecoupledPPO)
    advantages: Advantages = field(default_factory=GroupNormalized)
    loss_mean: Mean = "tokens"
    shaping: Shaping = field(default_factory=Shaping)
    positive_nll_coef: float = 0.0
    reference: Reference | None = None
    """A reference costs the memory of one more copy of the weights, and one more forward pass."""
    success_rate_above: float | None = None
    success_rate_below: float | None = None
    min_sequence_ess: float | None = None
    """Effective share of sequences that an adaptive bound on staleness keeps."""
    ess_exponent: float = 0.0
    """Exponent of that share in the scale of each update."""


_GEOMETRIC = Rejection(geometric_min=0.999, geometric_max=1.001)
_K3 = Rejection(k3_max=0.01)
_VERL = "verl, RolloutCorrectionConfig: "

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
    "vc_ppo": Preset(
        "VC-PPO, arXiv:2503.01491, decoupled lambdas; set trainer.critic.warmup_steps for its "
        "value pretraining",
        loss=PPO(),
        advantages=GAE(critic_lam=1.0),
    ),
    "vapo": Preset(
        "VAPO, arXiv:2504.05118; set trainer.critic.warmup_steps for its value pretraining",
        loss=PPO(clip_eps_high=0.28),
        advantages=GAE(length_alpha=0.05, critic_lam=1.0),
        positive_nll_coef=0.1,
    ),
    "ppo_turns": Preset(
        "PPO, arXiv:1707.06347, with the turns of a conversation as steps",
        loss=PPO(),
        advantages=GAE(step="turn"),
    ),
    "maxrl": Preset("MaxRL, arXiv:2602.02710; needs rewards.wrong=0", advantages=MaxRL()),
    "gdpo": Preset(
        "GDPO, arXiv:2601.05242; needs a reward function with named components",
        advantages=GDPO(),
    ),
    "spo": Preset(
        "SPO, arXiv:2509.13232; needs rewards.correct=1, rewards.wrong=0 and recurring prompts",
        advantages=SPO(),
    ),
    "vcpo": Preset(
        "VCPO, arXiv:2602.17616, with the settings of its authors' scripts",
        loss=OffPolicyReinforce(importance_weighting=Truncated(cap=8.0, level="sequence")),
        advantages=VCPO(),
        loss_mean="sequences",
        ess_exponent=0.5,
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
    "m2po_clip": Preset("M2PO as in its authors' code, arXiv:2510.01161", loss=M2POClip()),
    "cispo": Preset("CISPO, arXiv:2506.13585", loss=CISPO()),
    "dppo": Preset("DPPO, arXiv:2602.04879, total variation", loss=DPPO()),
    "dppo_kl": Preset(
        "DPPO, arXiv:2602.04879, binary KL", loss=DPPO(divergence="kl", threshold=0.05)
    ),
    "gmpo": Preset("GMPO, arXiv:2507.20673", loss=GMPO(), loss_mean="sequences"),
    "vespo": Preset("VESPO, arXiv:2602.10693", loss=VESPO()),
    # GSPO's loss of a sequence times its own length.
    "luspo": Preset("LUSPO, arXiv:2602.05261", loss=GSPO(), loss_mean="constant"),
    "opsm": Preset(
        "GRPO with the off-policy sequence mask of DeepSeek-V3.2, arXiv:2512.02556, at 0.1 nats",
        loss=DecoupledPPO(rejection=Rejection(negative_log_ratio_max=0.1)),
        loss_mean="sequences",
    ),
    "icepop": Preset(
        "IcePop (Ring-1T), arXiv:2510.18855",
        loss=DecoupledPPO(importance_weighting=Masked(floor=0.5, cap=5.0)),
    ),
    "kpop": Preset(
        "KPop, https://ringtech.notion.site/kpop",
        loss=DecoupledPPO(rejection=Rejection(binary_kl_max=0.1)),
    ),
    "mis": Preset(
        "masked importance sampling of sequences, as in TRL",
        loss=DecoupledPPO(importance_weighting=Masked(cap=3.0, level="sequence")),
    ),
    "double_clip": Preset(
        "decoupled PPO (AReaL, arXiv:2505.24298, equation 5) with a second clip on theta/behave",
        loss=DecoupledPPO(behave_clip=2.0),
        advantages=BatchNormalized(),
    ),
    "areal_adaptive": Preset(
        "decoupled PPO (AReaL, arXiv:2505.24298, equation 5) with a bound on staleness, "
        "and updates, that follow the effective share of sequences",
        loss=DecoupledPPO(importance_weighting=Masked(cap=5.0)),
        min_sequence_ess=0.98,
        ess_exponent=4.0,
    ),
    "decoupled_token_is": Preset(
        _VERL + "weights of tokens, truncated",
        loss=DecoupledPPO(importance_weighting=Truncated(cap=2.0)),
    ),
    "decoupled_seq_is": Preset(
        _VERL + "weights of sequences, truncated",
        loss=DecoupledPPO(importance_weighting=Truncated(cap=2.0, level="sequence")),
    ),
    "decoupled_seq_is_rs": Preset(
        _VERL + "weights of sequences, truncated, and rejection by them",
        loss=DecoupledPPO(
            importance_weighting=Truncated(cap=2.0, level="sequence"),
            rejection=Rejection(sequence_min=0.5, sequence_max=2.0),
        ),
    ),
    "decoupled_geo_rs": Preset(
        _VERL + "rejection by the geometric mean, no weights",
        loss=DecoupledPPO(importance_weighting=Unweighted(), rejection=_GEOMETRIC),
    ),
    "decoupled_geo_rs_token_tis": Preset(
        _VERL + "rejection by the geometric mean, and truncated weights of tokens",
        loss=DecoupledPPO(importance_weighting=Truncated(cap=2.0), rejection=_GEOMETRIC),
    ),
    "decoupled_geo_rs_seq_tis": Preset(
        _VERL + "rejection by the geometric mean, and truncated weights of sequences",
        loss=DecoupledPPO(
            importance_weighting=Truncated(cap=2.0, level="sequence"), rejection=_GEOMETRIC
        ),
    ),
    "decoupled_k3_rs": Preset(
        _VERL + "rejection by the k3 estimate, no weights",
        loss=DecoupledPPO(importance_weighting=Unweighted(), rejection=_K3),
    ),
    "decoupled_k3_rs_token_tis": Preset(
        _VERL + "rejection by the k3 estimate, and truncated weights of tokens",
        loss=DecoupledPPO(importance_weighting=Truncated(cap=2.0), rejection=_K3),
    ),
    "decoupled_k3_rs_seq_tis": Preset(
        _VERL + "rejection by the k3 estimate, and truncated weights of sequences",
        loss=DecoupledPPO(importance_weighting=Truncated(cap=2.0, level="sequence"), rejection=_K3),
    ),
    "bypass_ppo_clip": Preset(
        _VERL + "plain PPO around the policy that sampled", loss=DecoupledPPO(proximal="behave")
    ),
    "bypass_ppo_clip_geo_rs": Preset(
        _VERL + "plain PPO, and rejection by the geometric mean of theta/behave",
        loss=DecoupledPPO(proximal="behave", rejection=_GEOMETRIC),
    ),
    "bypass_ppo_clip_k3_rs": Preset(
        _VERL + "plain PPO, and rejection by the k3 estimate of theta/behave",
        loss=DecoupledPPO(proximal="behave", rejection=_K3),
    ),
    "bypass_pg_is": Preset(
        _VERL + "policy gradient with truncated weights of sequences",
        loss=OffPolicyReinforce(importance_weighting=Truncated(cap=2.0, level="sequence")),
    ),
    "bypass_pg_geo_rs": Preset(
        _VERL + "policy gradient, and rejection by the geometric mean of theta/behave",
        loss=OffPolicyReinforce(importance_weighting=Unweighted(), rejection=_GEOMETRIC),
    ),
    "bypass_pg_geo_rs_seq_tis": Preset(
        _VERL + "policy gradient with truncated weights of sequences, and rejection by the "
        "geometric mean",
        loss=OffPolicyReinforce(
            importance_weighting=Truncated(cap=2.0, level="sequence"), rejection=_GEOMETRIC
        ),
    ),
    "bypass_pg_geo_rs_token_tis": Preset(
        _VERL + "policy gradient with truncated weights of tokens, and rejection by the "
        "geometric mean",
        loss=OffPolicyReinforce(importance_weighting=Truncated(cap=2.0), rejection=_GEOMETRIC),
    ),
}
