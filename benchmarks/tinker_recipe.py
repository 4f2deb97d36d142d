"""The RL loop of the Tinker cookbook, unchanged, on the embedded policy of a running server.

    areal-tinker engine.num_slots=64                     # prints TINKER_BASE_URL and TINKER_API_KEY
    python benchmarks/tinker_recipe.py [--steps=40] [--log-path=FOLDER]

Runs in an environment with tinker-cookbook 0.6.1, which needs torch, and without areal_jax:
`tinker_cookbook.rl.train.main` with a dataset of sums modulo a digit, 16 problems x 8 samples a
step. Prints the share of correct answers in the first and the last ten steps.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

import chz
import tinker
from tinker_cookbook import renderers
from tinker_cookbook.recipes.math_rl.math_grading import extract_boxed
from tinker_cookbook.rl import train
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

RENDERER = "qwen3_instruct"


class SumModulo(ProblemEnv):
    """One problem."""

    def __init__(self, first: int, second: int, modulus: int, renderer: renderers.Renderer) -> None:
        super().__init__(renderer)
        self._question = f"Compute {first}+{second} modulo {modulus}."
        self._answer = str((first + second) % modulus)

    def get_question(self) -> str:
        return self._question

    def check_answer(self, sample_str: str) -> bool:
        return self.check_format(sample_str) and extract_boxed(sample_str) == self._answer

    def check_format(self, sample_str: str) -> bool:
        try:
            return extract_boxed(sample_str).isdigit()
        except ValueError:
            return False

    def get_reference_answer(self) -> str:
        return self._answer


class Problems(RLDataset):
    """Batches of problems, which depend on their number alone."""

    def __init__(self, renderer: renderers.Renderer, num_batches: int) -> None:
        self._renderer, self._num_batches = renderer, num_batches

    def get_batch(self, index: int) -> Sequence[ProblemGroupBuilder]:
        rng = Random(index)
        numbers = [(rng.randint(0, 50), rng.randint(0, 50), rng.randint(2, 9)) for _ in range(16)]
        return [
            ProblemGroupBuilder(partial(SumModulo, *each, self._renderer), num_envs=8)
            for each in numbers
        ]

    def __len__(self) -> int:
        return self._num_batches


@chz.chz
class ProblemsBuilder(RLDatasetBuilder):
    model_name: str
    num_batches: int

    async def __call__(self) -> tuple[Problems, None]:
        tokenizer = get_tokenizer(self.model_name)
        return Problems(renderers.get_renderer(RENDERER, tokenizer), self.num_batches), None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--log-path", default=tempfile.mkdtemp())
    given = parser.parse_args()
    (model,) = tinker.ServiceClient().get_server_capabilities().supported_models
    name = str(model.model_name)
    config = train.Config(
        learning_rate=1e-3,
        dataset_builder=ProblemsBuilder(model_name=name, num_batches=given.steps),
        model_name=name,
        recipe_name="sums_modulo",
        renderer_name=RENDERER,
        max_tokens=48,
        log_path=given.log_path,
        eval_every=0,
        save_every=0,
    )
    asyncio.run(train.main(config))
    rows = [json.loads(line) for line in (Path(given.log_path) / "metrics.jsonl").open()]
    correct = [row["env/all/correct"] for row in rows if "env/all/correct" in row]
    for part, values in (("first", correct[:10]), ("last", correct[-10:])):
        print(f"{part} 10 of {len(correct)} steps: {sum(values) / len(values):.3f} correct")


if __name__ == "__main__":
    main()
