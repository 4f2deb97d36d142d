"""Custom loss in one file: SPO (arXiv:2401.16025), a quadratic penalty instead of clipping.

    areal-train --exp=own_objective
    areal-train --exp=own_objective trainer.loss.clip_eps=0.1 num_steps=20

Hardware: any, as for --exp=aime, whose other settings it uses. To try your own loss, copy this file
anywhere, change `gain`, and pass its path as --exp. Importance weighting, packing, sharding,
metrics and checkpoints work unchanged.
"""

import chz

from areal_jax.config.load import load_experiment
from areal_jax.rl.config import CustomLoss


@chz.chz
class SPO(CustomLoss):
    """Simple Policy Optimization (arXiv:2401.16025, equation 9).

    Objective: u A - |A| / (2 clip_eps) (u - 1)².
    """

    clip_eps: float = chz.field(
        default=0.2, doc="distance of theta/proximal from 1 at which the gradient changes sign"
    )

    def gain(self, ratio, advantages, logp):
        return ratio * advantages - abs(advantages) / (2 * self.clip_eps) * (ratio - 1) ** 2


aime = load_experiment("aime")
experiment = chz.replace(aime, name="own_objective", trainer=chz.replace(aime.trainer, loss=SPO()))
