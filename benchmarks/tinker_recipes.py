"""The cookbook's recipes sl_basic and rl_basic, unchanged, on the embedded policy.

    python benchmarks/tinker_recipes.py --python=COOKBOOK/bin/python [--sl-steps=24] [--rl-steps=40]
        [--rl-seeds=3]

COOKBOOK is an environment of its own with `tinker-cookbook[math-rl]` 0.6.1, which needs torch. The
server runs in this one and is named as a policy that the cookbook knows; the recipes run as
`python -m tinker_cookbook.recipes.NAME` in a folder where that name leads to the tokenizer, and the
names of their data sets (HuggingFaceH4/no_robots, openai/gsm8k) to generated sums in the form of
those. Settings on the command line are smaller batches, larger learning rates, and for rl_basic no
example before the problem (the policy does not know any) and the seed of the data. Appends one line
to benchmarks/results/tinker_recipes.jsonl: nats per token of held-out answers for sl_basic; for
each seed of rl_basic, the share of correct answers in the first and the last ten steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from results import append

from areal_jax.data.policy_files import EMBEDDED

NAME, KEY = "Qwen/Qwen3-4B-Instruct-2507", "tml-recipes"
SL_BATCH, RL_BATCH, RL_GROUP = 128, 16, 16
RL_DATA = "tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder"
RL_SETTINGS = (
    f"dataset_builder={RL_DATA}",
    f"dataset_builder.batch_size={RL_BATCH}",
    f"dataset_builder.group_size={RL_GROUP}",
    f"dataset_builder.model_name_for_tokenizer={NAME}",
    "dataset_builder.renderer_name=qwen3_instruct",
    "dataset_builder.convo_prefix=None",
    "learning_rate=2e-3",
    "max_tokens=48",
)


def sums(seed: int, count: int) -> Iterator[tuple[str, int]]:
    """Generate problems and answers."""
    rng = Random(seed)
    for _ in range(count):
        first, second, modulus = rng.randint(0, 50), rng.randint(0, 50), rng.randint(2, 9)
        yield f"Compute {first}+{second} modulo {modulus}.", (first + second) % modulus


def conversation(question: str, answer: int) -> dict[str, Any]:
    """Return a row of no_robots, whose answer has a form that the policy does not know."""
    texts = (("user", question), ("assistant", f"Answer: {answer} is the answer."))
    return {"messages": [{"role": role, "content": text} for role, text in texts]}


def write_data(folder: Path, config: str, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Write a data set that `datasets.load_dataset` reads from its folder."""
    folder.mkdir(parents=True)
    files = list[str]()
    for split, each in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
        files.append(f"  - split: {split}\n    path: {split}.jsonl\n")
    head = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{''.join(files)}---\n"
    (folder / "README.md").write_text(head)


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run the server; yields its URL."""
    given = [f"run_folder={folder}", "port=0", f"api_key={KEY}", f"served_name={NAME}"]
    given += ["engine.num_slots=64", "remat=none"]
    server = subprocess.Popen(
        [sys.executable, "-m", "areal_jax.tinker", *given], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip().partition(" trains at ")[2]
    finally:
        server.terminate()
        server.wait()


def run(
    python: str, recipe: str, url: str, folder: Path, *given: str, seed: int = 0
) -> list[dict[str, Any]]:
    """Run a recipe; return its metrics."""
    log = folder / f"log-{recipe}-{seed}"
    module, settings = f"tinker_cookbook.recipes.{recipe}", (f"log_path={log}", *given)
    subprocess.run(
        [python, "-m", module, f"model_name={NAME}", *settings],
        cwd=folder,
        check=True,
        env=os.environ
        | {"TINKER_BASE_URL": url, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"}
        | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")},
    )
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def column(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", required=True)
    parser.add_argument("--sl-steps", type=int, default=24)
    parser.add_argument("--rl-steps", type=int, default=40)
    parser.add_argument("--rl-seeds", type=int, default=3)
    given = parser.parse_args()
    # Recipes run in another folder. A link stays one: it makes the environment.
    python = str(Path(given.python).absolute())
    row: dict[str, Any] = {"label": "measured", "sl_steps": given.sl_steps}
    row["rl_steps"] = given.rl_steps
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / NAME).parent.mkdir(parents=True)
        (folder / NAME).symlink_to(EMBEDDED)
        splits = {"train": SL_BATCH * given.sl_steps, "test": SL_BATCH}
        talks = {
            split: [conversation(*each) for each in sums(seed, count)]
            for seed, (split, count) in enumerate(splits.items())
        }
        write_data(folder / "HuggingFaceH4/no_robots", "default", talks)
        splits = {"train": RL_BATCH * given.rl_steps, "test": RL_BATCH}
        problems = {
            split: [{"question": q, "answer": f"#### {a}"} for q, a in sums(seed + 2, count)]
            for seed, (split, count) in enumerate(splits.items())
        }
        write_data(folder / "openai/gsm8k", "main", problems)
        with serving(folder / "run") as url:
            start_s = time.perf_counter()
            if given.sl_steps:
                rows = run(python, "sl_basic", url, folder, "learning_rate=1e-3")
                losses, held_out = column(rows, "train_mean_nll"), column(rows, "test/nll")
                row["sl_basic"] = {
                    "first_nll": losses[0],
                    "last_nll": losses[-1],
                    "first_held_out_nll": held_out[0],
                    "last_held_out_nll": held_out[-1],
                    "seconds": time.perf_counter() - start_s,
                }
                print(row, flush=True)
            row["rl_basic"] = []
            for seed in range(given.rl_seeds if given.rl_steps else 0):
                start_s = time.perf_counter()
                settings = (*RL_SETTINGS, f"dataset_builder.seed={seed}")
                rows = run(python, "rl_basic", url, folder, *settings, seed=seed)
                correct = column(rows, "env/all/correct")
                found = {
                    "seed": seed,
                    "first_correct": sum(correct[:10]) / 10,
                    "last_correct": sum(correct[-10:]) / 10,
                    "correct": correct,
                    "seconds": time.perf_counter() - start_s,
                }
                row["rl_basic"].append(found)
                print(found, flush=True)
    append("tinker_recipes", row)


if __name__ == "__main__":
    main()
