"""Workload of all contestants: a GRPO update of a small Qwen2 on 8 prompts x 4 samples.

The environment variable RL_STEP_SHAPE chooses one of SHAPES, and RL_STEP_DTYPE the type in which
the policy computes; its parameters are float32. Token ids are spelled as words. The peer scripts
import this module, each in its own environment; only `make_tokenizer` needs transformers and
tokenizers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Shape(NamedTuple):
    """Sizes of the policy, and tokens of a prompt and of a completion."""

    layers: int
    hidden: int
    mlp: int
    prompt_tokens: int
    new_tokens: int


SHAPES = {
    "1m": Shape(layers=4, hidden=128, mlp=512, prompt_tokens=16, new_tokens=64),
    "24m": Shape(layers=24, hidden=256, mlp=1024, prompt_tokens=256, new_tokens=256),
}
SHAPE = SHAPES[os.environ.get("RL_STEP_SHAPE", "1m")]
COMPUTE_DTYPES = ("float32", "bfloat16")
COMPUTE_DTYPE = os.environ.get("RL_STEP_DTYPE", "float32")

# The policy: Qwen2, untied, random weights.
NUM_LAYERS = SHAPE.layers
HIDDEN_SIZE = SHAPE.hidden
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = HIDDEN_SIZE // NUM_HEADS
MLP_SIZE = SHAPE.mlp
VOCAB_SIZE = 512
ROPE_THETA = 10_000
RMS_NORM_EPS = 1e-6

# The batch, of one optimizer update.
NUM_PROMPTS = 8
SAMPLES_PER_PROMPT = 4
NUM_SEQUENCES = NUM_PROMPTS * SAMPLES_PER_PROMPT
PROMPT_TOKENS = SHAPE.prompt_tokens
NEW_TOKENS = SHAPE.new_tokens
ROLLOUT_TOKENS_PER_STEP = NUM_SEQUENCES * NEW_TOKENS
TRAIN_TOKENS_PER_STEP = NUM_SEQUENCES * (PROMPT_TOKENS + NEW_TOKENS)
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0


def parse_steps(description: str) -> tuple[int, int]:
    """Read `--warmup-steps` and `--steps` from the command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--warmup-steps", type=int, default=5, help="number of warm-up updates, at least 1"
    )
    parser.add_argument("--steps", type=int, default=40, help="number of measured updates")
    args = parser.parse_args()
    if args.warmup_steps < 1 or args.steps < 1:
        parser.error(
            f"--warmup-steps and --steps must be at least 1, found {args.warmup_steps} and "
            f"{args.steps}"
        )
    return args.warmup_steps, args.steps


def num_threads() -> int:
    """Return the number of CPUs that this process may use, as set by `taskset`."""
    return len(os.sched_getaffinity(0))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer that spells token id i as the word `i`.

    Padding and end of sequence are outside the model's vocabulary and never sampled, so that every
    sample has exactly NEW_TOKENS tokens without a logits processor.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {str(i): i for i in range(VOCAB_SIZE)} | {"<pad>": VOCAB_SIZE, "<eos>": VOCAB_SIZE + 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_prompts(num_batches: int) -> list[list[str]]:
    """Sample `num_batches` batches of prompts of PROMPT_TOKENS words, the same in every run."""
    rng = random.Random(0)
    words = [str(i) for i in range(VOCAB_SIZE)]
    return [
        [" ".join(rng.choices(words, k=PROMPT_TOKENS)) for _ in range(NUM_PROMPTS)]
        for _ in range(num_batches)
    ]


def share_of_low_ids(
    prompts: Sequence[str], completions: Sequence[str], **_columns: object
) -> list[float]:
    """Reward a completion with the share of its ids below half of the vocabulary."""
    ids = [[int(word) for word in completion.split()] for completion in completions]
    return [sum(i < VOCAB_SIZE // 2 for i in row) / len(row) for row in ids]


class StepClock:
    """Seconds of each update: rollout, training, whole step, and CPU time of all threads."""

    def __init__(self) -> None:
        self.rollout_s: list[float] = []
        self.train_s: list[float] = []
        self.step_s: list[float] = []
        self.cpu_s: list[float] = []
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def end_rollout(self, seconds: float, completion_lengths: Sequence[int]) -> None:
        """Record a rollout.

        Raises:
            ValueError: it has not NUM_SEQUENCES completions of NEW_TOKENS tokens.
        """
        if list(completion_lengths) != [NEW_TOKENS] * NUM_SEQUENCES:
            raise ValueError(
                f"expected {NUM_SEQUENCES} completions of {NEW_TOKENS} tokens, found lengths "
                f"{list(completion_lengths)}"
            )
        self.rollout_s.append(seconds)

    def end_step(self, train_s: float) -> None:
        """Record the training part; a step includes data and logging since the previous one.

        Further calls before the next rollout add up: the micro-batches of a step.
        """
        wall, cpu = time.perf_counter(), time.process_time()
        parts = train_s, wall - self._wall, cpu - self._cpu
        for column, seconds in zip((self.train_s, self.step_s, self.cpu_s), parts, strict=True):
            if len(column) < len(self.rollout_s):
                column.append(0.0)
            column[-1] += seconds
        self._wall, self._cpu = wall, cpu

    def report(self, *, peer: str, version: str, num_params: int, warmup_steps: int) -> str:
        """Return one JSON line: medians over the steps after the first `warmup_steps`."""
        if not len(self.rollout_s) == len(self.train_s) == len(self.step_s):
            raise ValueError(
                f"a step lacks a phase: {len(self.rollout_s)} rollouts, {len(self.train_s)} updates"
            )
        rows = list(zip(self.rollout_s, self.train_s, self.step_s, self.cpu_s, strict=True))[
            warmup_steps:
        ]
        rollout_s, train_s, step_s, cpu_s = (median(column) for column in zip(*rows, strict=True))
        other_s = median(step - rollout - train for rollout, train, step, _ in rows)
        return json.dumps(
            {
                "peer": peer,
                "version": version,
                "threads": num_threads(),
                "num_params": num_params,
                "steps": len(rows),
                "rollout_tokens_per_s": round(ROLLOUT_TOKENS_PER_STEP / rollout_s, 1),
                "train_tokens_per_s": round(TRAIN_TOKENS_PER_STEP / train_s, 1),
                "steps_per_s": round(1 / step_s, 4),
                "cpu_seconds_per_step": round(cpu_s, 4),
                "rollout_s": round(rollout_s, 4),
                "train_s": round(train_s, 4),
                "other_s": round(other_s, 4),
                "step_s": round(step_s, 4),
            }
        )
