"""A game as an environment: a safe that opens with the answer to a problem, within two tries.

    areal-train --exp=safe

Hardware: any; two CPU cores and 2 GB of memory suffice. Needs no network, account or accelerator.

The class below has Gymnasium's `reset` and `step` and runs in processes of its own. pass@1 counts
games in which the safe opens: on 256 held-out problems it rises from 28 % to 53 %.

With an environment of your own:

    areal-train --exp=aime workflow=Environment workflow.environment=my_env.py:Maze \\
        tasks=Seeds eval_tasks=Seeds eval_tasks.first=1000000
"""

import random

import chz

from areal_jax.config.load import load_experiment
from areal_jax.data.config import Seeds
from areal_jax.data.problems import SyntheticProblems
from areal_jax.rewards.math_answers import extract_answer
from areal_jax.workflows.config import Environment

FIRST_HELDOUT = 1_000_000
"""Seeds from here on play with held-out problems."""


class Safe:
    """A safe with a generated problem on its door."""

    def __init__(self, tries: int = 2) -> None:
        self.tries = tries
        self.problems = {
            split: SyntheticProblems(4096, split, (), "easy", 0) for split in ("train", "heldout")
        }

    def reset(self, seed: int) -> tuple[str, dict]:
        """Lock the safe; its problem."""
        problems = self.problems["heldout" if seed >= FIRST_HELDOUT else "train"]
        self.problem, self.left = random.Random(seed).choice(problems), self.tries
        return self.problem.question, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Try the answer of a turn."""
        self.left -= 1
        if extract_answer(action) == str(self.problem.answer):
            return "The safe is open.", 1.0, True, False, {}
        return "That is not the answer. Find another.", 0.0, self.left == 0, False, {}


aime = load_experiment("aime")
experiment = chz.replace(
    aime,
    name="safe",
    description="a game of two turns: a safe that opens with the answer to a problem",
    num_steps=40,
    tasks=Seeds(),
    eval_tasks=Seeds(first=FIRST_HELDOUT, num_tasks=256),
    workflow=Environment(environment=f"{__file__}:Safe", max_turns=2, observation_tokens=48),
    # Second turns are new to the policy: a smaller learning rate keeps it stable.
    trainer=chz.replace(
        aime.trainer, optimizer=chz.replace(aime.trainer.optimizer, learning_rate=2e-4)
    ),
    evaluation=chz.replace(aime.evaluation, every_steps=10, num_tasks=256),
)
