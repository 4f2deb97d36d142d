"""A game of two players against a frozen copy: the last nut wins.

    python benchmarks/environments.py --games=nim.jsonl
    areal-train --exp=sft examples=Files examples.path=nim.jsonl --run-folder=runs/nim_rules
    areal-train --exp=nim policy.path=runs/nim_rules/policy

Hardware: any; two CPU cores and 2 GB of memory suffice. Needs no network, account or accelerator.

Two players take one, two or three nuts in turn from a heap of 5 to 20; who takes the last one wins.
The class below has `reset` and `step` with a dict by player. The policy plays against the policy
that training started from (`workflow.opponents=initial`), which never changes, and has either seat.
pass@1 is the share of games that it wins. A turn that names no possible number takes one that the
seed draws, so that games are not decided by the form of an answer.

The first two commands teach the embedded policy the rules: games of players who take any possible
number.

Against itself, with the views of both players as samples:

    areal-train --exp=nim workflow.opponents=
"""

import random

import chz

from areal_jax.config.load import load_experiment
from areal_jax.data.config import Seeds
from areal_jax.rewards.math_answers import extract_answer
from areal_jax.workflows.config import Environment


class Nim:
    """A heap of nuts from which two players take in turn."""

    players = ("first", "second")

    def __init__(self, most: int = 3, largest: int = 20) -> None:
        self.most, self.largest = most, largest

    def reset(self, seed: int) -> tuple[dict[str, str], dict]:
        """Heap up nuts; the first player's view."""
        self.rng = random.Random(seed)
        self.left, self.turn = self.rng.randint(self.most + 2, self.largest), 0
        return self._view(), {}

    def step(
        self, actions: dict[str, str]
    ) -> tuple[dict[str, str], dict[str, float], bool, bool, dict]:
        """Take the nuts that the player in turn names; the next player's view."""
        (player, text), *_ = actions.items()
        answer, most = extract_answer(text, accept_plain=True) or "", min(self.most, self.left)
        drawn = self.rng.randint(1, most)
        self.left -= int(answer) if answer in map(str, range(1, most + 1)) else drawn
        if not self.left:
            return {}, {each: float(each == player) for each in self.players}, True, False, {}
        self.turn = 1 - self.turn
        return self._view(), {}, False, False, {}

    def _view(self) -> dict[str, str]:
        return {self.players[self.turn]: f"{self.left} nuts are left. How many do you take?"}


aime = load_experiment("aime")
experiment = chz.replace(
    aime,
    name="nim",
    description="a game of two players against a frozen copy of the policy",
    num_steps=60,
    tasks=Seeds(),
    eval_tasks=Seeds(first=1_000_000, num_tasks=256),
    workflow=Environment(
        environment=f"{__file__}:Nim", opponents=("initial",), max_turns=20, observation_tokens=32
    ),
    # A turn is one number; later turns see all earlier ones.
    engine=chz.replace(aime.engine, max_new_tokens=12, max_prompt_tokens=384),
    evaluation=chz.replace(aime.evaluation, every_steps=20, num_tasks=256),
)
