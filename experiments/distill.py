"""On-policy distillation: the embedded policy learns from what a teacher makes of its own samples.

    python -m areal_jax.train --exp=aime --run-folder=runs/teacher
    python -m areal_jax.train --exp=distill trainer.teacher.path=runs/teacher/policy

Hardware: any; two CPU cores and 2 GB of memory suffice. No network, no account, no accelerator. A
    teacher of 68.9 % held-out pass@1 brought the embedded policy from 26.0 % to 60.2 % in these 60
    steps, and its divergence from 0.23 nats a token to 0.035.

The first command makes a teacher; any policy with the same tokens will do, of any size. Then the
student answers, and every token's advantage is log(teacher/student): by the policy gradient it
descends the reverse KL, token by token, on what it says itself. Rewards are measured and not learnt
from; `trainer.teacher.reward_weight=1` learns from both.
"""

import chz

from areal_jax.config.load import load_experiment
from areal_jax.rl.config import Teacher

_aime = load_experiment("aime")

experiment = chz.replace(
    _aime,
    name="distill",
    description="the embedded policy learns from a teacher, on its own samples",
    num_steps=60,
    trainer=chz.replace(
        _aime.trainer, teacher=Teacher(path="runs/teacher/policy", reward_weight=0.0)
    ),
    evaluation=chz.replace(_aime.evaluation, every_steps=20),
)
