"""A reward model from pairs of a chosen and a rejected answer, after Bradley and Terry.

python -m areal_jax.train --exp=reward_model examples=Files examples.path=pairs.jsonl policy.path=DIR
"""

import chz

from areal_jax.config import load_experiment
from areal_jax.rl.config import BradleyTerry

experiment = chz.replace(
    load_experiment("dpo"), name="reward_model", description="a reward model from pairs of answers", loss=BradleyTerry()
)
