"""Learning curves of environments: puzzles of reasoning-gym, a game, a game of two players, and
repositories to repair.

    python benchmarks/environments.py                    # three seeds each
    python benchmarks/environments.py --only=nim --seeds=0
    python benchmarks/environments.py --games=nim.jsonl  # games of nim at random, for --exp=sft

Puzzles and nim begin with fine-tuning that teaches the form of an answer: on answers of generators,
and on games of players who take any possible number. coding_agent begins with
demonstrations of repairs and of mistakes. Each seed then trains the same policy. Figures are pass@1
on held-out puzzles, games or repositories, before and after; for nim it is the share of games won
against the frozen copy of the policy that training starts from.

Every run appends one row to results/environments.jsonl; runs that have a row are not repeated.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import PercentFormatter
from results import FOLDER, append
from rich.console import Console
from rich.table import Table
from runs import run_all

from areal_jax.metrics import jsonl, names
from areal_jax.reports.plots import BLUE, as_png, new_figure, plain, title
from areal_jax.rewards.functions import load_function

NAME = "environments"
NUM_STEPS = {"coding_agent": 20, "number_filtering": 60, "rotate_matrix": 60}
"""Of runs, unless 40."""
NUM_GAMES = 3000
FINE_TUNING = {
    "count_bits": (("letter_counting", "count_bits", "lcm"), 100),
    "number_filtering": (("number_filtering",), 400),
    "rotate_matrix": (("rotate_matrix",), 250),
}
"""Generators and steps of the fine-tuning that puzzles begin with."""
PARAMETERS = {
    "letter_counting": {"max_words": 8},
    "count_bits": {"max_n": 1000},
    "lcm": {"max_value": 12},
    "number_filtering": {
        "min_numbers": 2,
        "max_numbers": 3,
        "min_decimals": 0,
        "max_decimals": 0,
        "min_value": 0,
        "max_value": 20,
    },
    "rotate_matrix": {"min_n": 2, "max_n": 2, "min_rotations": 0, "max_rotations": 3},
}
NAMES = (*FINE_TUNING, "safe", "nim", "coding_agent")
LARGE_BATCHES = (
    "rollout.groups_per_batch=32",
    "rollout.samples_per_group=16",
    "rollout.max_staleness=1",
    "engine.num_slots=96",
    "trainer.optimizer.learning_rate=2e-4",
)
"""Of puzzles whose pass@1 falls with smaller batches and a higher rate."""
SHORT_ROWS = (
    "trainer.row_tokens=256",
    "trainer.rows_per_micro_batch=8",
    "checkpoint.every_steps=0",
)
"""Settings of fine-tuning on short examples."""


def random_games(num_games: int) -> Iterator[list[dict[str, str]]]:
    """Play nim at random; what each player sees and does, as a conversation."""
    game = load_function(f"{Path(__file__).parents[1] / 'experiments' / 'nim.py'}:Nim")()
    for seed in range(num_games):
        view, _ = game.reset(seed)
        found: dict[str, list[dict[str, str]]] = {player: [] for player in game.players}
        while view:
            ((player, text),) = view.items()
            action = str(game.rng.randint(1, min(game.most, game.left)))
            found[player] += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": action},
            ]
            view, *_ = game.step({player: action})
        yield from found.values()


def write_games(path: Path) -> None:
    """Write games at random as rows of examples."""
    path.write_text(
        "".join(json.dumps({"messages": each}) + "\n" for each in random_games(NUM_GAMES))
    )


def settings_of(name: str, folder: Path) -> tuple[str, ...]:
    """Return the settings of a run, after the fine-tuning that it starts from."""
    if name == "safe":
        return ("--exp=safe",)
    if name == "coding_agent":
        fine_tuning = (
            "--exp=tiny_tools_sft",
            "examples=Repositories",
            "examples.num_tasks=100000",
            "engine.max_prompt_tokens=288",
        )
        run_all({"tiny_coder": fine_tuning}, folder, 300)
        return "--exp=coding_agent", f"policy.path={folder / 'tiny_coder' / 'policy'}"
    if name == "nim":
        games = folder / "nim.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        write_games(games)
        examples = ("examples=Files", f"examples.path={games}")
        prepared, chosen, num_steps = "nim_rules", ("--exp=nim",), 100
    else:
        generators, num_steps = FINE_TUNING[name]
        parameters = json.dumps({each: PARAMETERS[each] for each in generators})
        examples = (
            "examples=ReasoningGym",
            f"examples.names={','.join(generators)}",
            f"examples.parameters={parameters}",
        )
        prepared = f"{name}_answers"
        parameters = json.dumps(PARAMETERS[name])
        chosen = (
            "--exp=aime",
            "eval_tasks.split=heldout",
            *(
                f"{tasks}{each}"
                for tasks in ("tasks", "eval_tasks")
                for each in ("=ReasoningGym", f".names={name}", f".parameters={parameters}")
            ),
            "engine.max_new_tokens=32",
            "engine.max_prompt_tokens=160",
            *(LARGE_BATCHES if name in NUM_STEPS else ()),
        )
    run_all({prepared: ("--exp=sft", *examples, *SHORT_ROWS)}, folder, num_steps)
    return (*chosen, f"policy.path={folder / prepared / 'policy'}")


def run(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train one seed; the row of its figures."""
    num_steps = NUM_STEPS.get(name, 40)
    settings = (
        *settings_of(name, folder),
        f"seed={seed}",
        f"evaluation.every_steps={num_steps // 2}",
        "evaluation.num_tasks=256",
        "checkpoint.export_hf=false",
    )
    of_run = f"{name}_{seed}"
    rows = run_all({of_run: settings}, folder, num_steps)[of_run]
    scores = {str(row["version"]): row[names.PASS_AT_1] for row in rows if names.PASS_AT_1 in row}
    return {"game": name, "seed": seed, "pass_at_1": scores}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print and plot the curves of NAMES."""
    curves: dict[str, dict[int, Mapping[str, float]]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: row["game"]):
        curves[row["game"]][row["seed"]] = row["pass_at_1"]
    table = Table("environment", "seed", "pass@1 after steps", title=NAME)
    figure = new_figure(11.0, 2.8)
    for axes, (name, seeds) in zip(
        figure.subplots(1, len(curves), sharey=True, squeeze=False).flat,
        curves.items(),
        strict=True,
    ):
        for seed, scores in sorted(seeds.items()):
            axes.plot([int(step) for step in scores], list(scores.values()), color=BLUE, marker="o")
            shown = " ".join(f"{score:.1%} ({step})" for step, score in scores.items())
            table.add_row(name, str(seed), shown)
        title(axes, name)
        plain(axes)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(0, 1)
        axes.set_xlabel("trainer steps", fontsize=9)
    Console().print(table)
    (FOLDER / f"{NAME}.png").write_bytes(as_png(figure))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs") / NAME, help="of the runs")
    parser.add_argument("--only", default=",".join(NAMES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--games", type=Path, help="write games of nim here, and run nothing")
    options = parser.parse_args()
    if options.games is not None:
        write_games(options.games)
        return
    where = FOLDER / f"{NAME}.jsonl"
    for name in options.only.split(","):
        for seed in map(int, options.seeds.split(",")):
            stored = jsonl.read(where) if where.exists() else ()
            if not any((each["game"], each["seed"]) == (name, seed) for each in stored):
                append(NAME, run(name, seed, options.folder))
    show([row for row in jsonl.read(where) if row["game"] in NAMES])


if __name__ == "__main__":
    main()
