"""How a batch of groups becomes one version of the policy."""

from __future__ import annotations

from typing import Literal

import chz

from areal_jax.bounds import FRACTION, NOT_NEGATIVE, POSITIVE
from areal_jax.models.config import Remat
from areal_jax.rl.config import (
    GAE,
    Advantages,
    DecoupledPPO,
    GroupNormalized,
    Loss,
    Mean,
    Reference,
    Shaping,
    Teacher,
)


@chz.chz
class OptimizerConfig:
    """AdamW; defaults are the paper's (table 3)."""

    learning_rate: float = chz.field(validator=POSITIVE, default=2e-5, doc="peak learning rate")
    schedule: Literal["constant", "cosine", "linear"] = chz.field(
        default="constant", doc="after the warm-up; cosine and linear end at 0"
    )
    warmup_fraction: float = chz.field(
        validator=FRACTION,
        default=0.001,
        doc="share of all updates over which the rate rises from 0",
    )
    beta1: float = chz.field(validator=FRACTION, default=0.9, doc="decay of the first moment")
    beta2: float = chz.field(validator=FRACTION, default=0.95, doc="decay of the second moment")
    eps: float = chz.field(validator=POSITIVE, default=1e-5, doc="Adam's epsilon")
    weight_decay: float = chz.field(
        validator=NOT_NEGATIVE, default=0.05, doc="decoupled weight decay, on matrices only"
    )
    max_grad_norm: float = chz.field(
        validator=POSITIVE, default=1.0, doc="global gradient norm is clipped to this"
    )
    ess_exponent: float = chz.field(
        validator=NOT_NEGATIVE,
        default=0.0,
        doc="reinforcement learning: the rate of an update is multiplied by its effective share of "
        "sequences (as trainer/sequence_ess) to this power (VCPO: 0.5); 0: it is not",
    )
    offload: bool = chz.field(
        default=False,
        doc="keep moments in the host's memory between updates; each then waits for them",
    )


@chz.chz
class Critic:
    """What says, under advantages=GAE, how much reward is still to come: a policy with one number a
    token for a head.
    """

    path: str | None = chz.field(
        default=None,
        doc=(
            "Hugging Face folder or hub name of a critic, a reward model or a language model; "
            "none: policy.path"
        ),
    )
    optimizer: OptimizerConfig | None = chz.field(
        default=None,
        doc="of the critic's updates, as many as the policy's; none: as trainer.optimizer",
    )
    value_clip_eps: float | None = chz.field(
        validator=POSITIVE,
        default=0.5,
        doc=(
            "how far an update may move a value that comes nearer to its return, in units of "
            "reward; none: any way"
        ),
    )
    warmup_steps: int = chz.field(
        validator=NOT_NEGATIVE,
        default=0,
        doc="first steps of a run, in which only the critic learns",
    )


@chz.chz
class TrainerConfig:
    loss: Loss = chz.field(
        default_factory=DecoupledPPO,
        doc="the objective: DecoupledPPO, PPO, GSPO, GMPO, SAPO, CISPO, M2PO, M2POClip, DPPO, "
        "VESPO, Reinforce or OffPolicyReinforce",
    )
    loss_mean: Mean = chz.field(
        default="tokens",
        doc="what a mini-batch's loss is the mean of: its tokens; its sequences, each the mean "
        "of its tokens; or constant: its "
        "sequences, each the sum of its tokens over engine.max_new_tokens (Dr.GRPO)",
    )
    positive_nll_coef: float = chz.field(
        validator=NOT_NEGATIVE,
        default=0.0,
        doc="weight of the negative log-likelihood of correct answers, a mean over their tokens of "
        "a mini-batch (VAPO: 0.1); 0: none",
    )
    entropy_coef: float = chz.field(
        validator=NOT_NEGATIVE,
        default=0.0,
        doc=(
            "weight of the entropy bonus: the mean entropy of what the loss's tokens were "
            "sampled from"
        ),
    )
    shaping: Shaping = chz.field(
        default_factory=Shaping, doc="what becomes of rewards before advantages are made of them"
    )
    advantages: Advantages = chz.field(
        default_factory=GroupNormalized,
        doc="GroupNormalized, LeaveOneOut, MaxRL, GDPO, SPO, VCPO, BatchNormalized, Unnormalized, "
        "or GAE, with a critic",
    )
    critic: Critic = chz.field(
        default_factory=Critic, doc="what advantages=GAE asks, and trains beside the policy"
    )
    reference: Reference | None = chz.field(
        default=None,
        doc=(
            "a frozen policy not to stray from (trainer.reference=Reference, or any of its "
            "settings)"
        ),
    )
    teacher: Teacher | None = chz.field(
        default=None,
        doc="a frozen policy to learn from on one's own samples (trainer.teacher.path=...)",
    )
    optimizer: OptimizerConfig = chz.field(default_factory=OptimizerConfig)
    num_mini_batches: int = chz.field(
        validator=POSITIVE,
        default=4,
        doc="optimizer updates in one step; each sees its share of the batch's groups",
    )
    row_tokens: int = chz.field(
        validator=NOT_NEGATIVE,
        default=0,
        doc="tokens of a packed row; 0: the engine's longest sequence",
    )
    share_prefixes: Literal["auto", "always", "never"] = chz.field(
        default="auto",
        doc="pack tokens once with which several samples begin, such as the prompt of a group; "
        "auto: where attention is as fast with them (on CPUs and GPUs), always: on TPUs with "
        "attention in plain XLA",
    )
    row_image_tokens: int = chz.field(
        validator=NOT_NEGATIVE,
        default=0,
        doc="image tokens of a packed row, for which the vision tower is computed; 0: the samples "
        "have no images",
    )
    freeze_vision: bool = chz.field(
        default=False, doc="keep the parameters of the vision tower as they are"
    )
    rows_per_micro_batch: int = chz.field(
        validator=POSITIVE,
        default=2,
        doc=(
            "packed rows of a micro-batch on each shard of the batch; a tiny policy on a CPU is "
            "fastest at 300 to 400 tokens"
        ),
    )
    logp_chunk_tokens: int = chz.field(
        validator=POSITIVE,
        default=1024,
        doc="tokens whose logits exist at the same time, per shard",
    )
    router_aux_loss_coef: float | None = chz.field(
        validator=NOT_NEGATIVE,
        default=None,
        doc="weight of the load-balance loss of experts; none: what the policy's config.json says",
    )
    remat: Remat = chz.field(
        default="full",
        doc="what the backward pass computes again instead of keeping it; none: nothing, dots: "
        "all but products with weights "
        "and attention, attention: all but attention, full: everything",
    )

    def num_critic_steps(self) -> int:
        """Return the number of first steps in which only the critic learns."""
        return self.critic.warmup_steps if isinstance(self.advantages, GAE) else 0
