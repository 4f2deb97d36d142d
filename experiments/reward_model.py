"""A reward model from pairs of a chosen and a rejected answer, after Bradley and Terry.

    python -m areal_jax.train --exp=reward_model examples=Files examples.path=pairs.jsonl \\
        policy.path=DIR

Hardware: as for `--exp=dpo`, whose rows it reads and whose settings it shares. Made from the
embedded policy, which is what `--exp=reward_model` alone does, it ranks 79 % of 512 held-out pairs
right after 50 updates, from 50 % at first.

The policy in DIR loses its head for a fresh one that makes one number of every token; that of an
answer's last token is its score, and the chosen answer's is to be above the rejected one's.
RUN_FOLDER/policy is then a sequence classifier of one label, as transformers'
AutoModelForSequenceClassification loads it, and as policy.path goes on training.
"""

import chz

from areal_jax.config.load import load_experiment
from areal_jax.rl.config import BradleyTerry

experiment = chz.replace(
    load_experiment("dpo"),
    name="reward_model",
    description="a reward model from pairs of answers",
    loss=BradleyTerry(),
)
