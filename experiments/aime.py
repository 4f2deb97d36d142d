"""AIME-style problems with the embedded policy, on a laptop CPU.

    areal-train --exp=aime

Hardware: any; two CPU cores and 2 GB of memory suffice. Needs no network, account or accelerator.

The tiny policy of the package executes each solution method with few errors, but does not know
which method is correct. Training on generated problems (integer answers 0-999, many families)
teaches it to choose: pass@1 on 512 held-out problems rises from 26-28 % to 67-69 % (seeds 0, 1 and
2) in about 3 minutes.

Real problems are longer, and mostly too difficult for this policy:

    areal-train --exp=aime tasks=Files tasks.path=aime.json eval_tasks=Files \\
        eval_tasks.path=aime24.jsonl
"""

from areal_jax.config.experiment import Experiment
from areal_jax.data.config import Synthetic
from areal_jax.engine.config import EngineConfig
from areal_jax.evaluation.config import EvaluationConfig
from areal_jax.rollout.config import RolloutConfig
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig

experiment = Experiment(
    name="aime",
    description="AIME-style problems with the embedded policy, on a laptop CPU",
    num_steps=150,
    tasks=Synthetic(),
    eval_tasks=Synthetic(split="heldout", num_tasks=512),
    rollout=RolloutConfig(groups_per_batch=16, samples_per_group=8, max_staleness=2),
    # The longest generated problem has 42 tokens, the longest worked solution 77.
    engine=EngineConfig(num_slots=48, max_new_tokens=96),
    trainer=TrainerConfig(
        # The paper's 2e-5 is for 1.5 B parameters and batches of 8192 samples; a tiny policy takes
        # larger steps.
        optimizer=OptimizerConfig(learning_rate=4e-4, schedule="linear", warmup_fraction=0.05),
        num_mini_batches=2,
        remat="none",
    ),
    evaluation=EvaluationConfig(every_steps=50, num_tasks=512),
)
