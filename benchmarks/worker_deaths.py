"""A run on a cluster with randomly killed workers, versus an undisturbed and a single-process run.

    python benchmarks/worker_deaths.py
    python benchmarks/worker_deaths.py --seeds 1 2 3 --load 2 --steps 12 --kills 6

Needs the extra `ray`. Trains the embedded policy on this machine three times with one seed: in one
process (launch=Local), with 2 trainer hosts, 2 engines and 2 reward workers (launch=Ray), and so
again while engines and reward workers are killed (SIGKILL) at random times. Checks that no task is
skipped or trained on twice, that no token is too old, and that the log reports every death. Appends
to results/worker_deaths.jsonl and plots results/worker_deaths.png.

With --seeds, only the run with kills, once per seed, with --load processes that keep a core busy
each. Each of these drills must end within --most-s with the same invariants, and appends a row.

Expected: the three learning curves agree within the standard error of an evaluation, and the
answers per second of the two clusters differ only by the time without engines.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from run_laws import broken_laws
from runs import read, steps

from areal_jax.cluster.environment import prepare

# Set before jax is imported, which the modules of the run do.
from areal_jax.config.experiment import Experiment
from areal_jax.config.load import CONFIG_FILE, load_experiment, write_config
from areal_jax.metrics import names

NAME = "worker_deaths"
CLUSTER = (
    *(
        "launch=ray",
        "launch.trainer_hosts=2",
        "launch.rollout_engines=2",
        "launch.reward_workers=2",
    ),
    *("rewards.num_workers=1", "launch.report_every_s=0.5"),
)
RUNS: Mapping[str, tuple[str, ...]] = {
    "one process": (),
    "cluster": CLUSTER,
    "cluster, workers killed": CLUSTER,
}


class Kills(logging.Handler):
    """Kills workers at random times and records log messages."""

    def __init__(self, most: int, seed: int, every_s: tuple[float, float]) -> None:
        super().__init__(logging.WARNING)
        self._random, self._most, self._every_s = random.Random(seed), most, every_s
        self.killed: list[str] = []
        self.reported: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.reported.append(record.getMessage())

    @property
    def unreported(self) -> list[str]:
        """Killed workers that the log does not mention."""
        return [
            name
            for name in self.killed
            if not any(message.startswith(f"worker died: {name} ") for message in self.reported)
        ]

    async def kill(self, run: Any) -> None:
        """Kill engines and reward workers of a run one after another at random times."""
        while len(self.killed) < self._most:
            await asyncio.sleep(self._random.uniform(*self._every_s))
            parts = [*run.engine.connections, *run.grader.counted.connections]
            # The death of a worker is detected a little after the kill.
            living = [part for part in parts if part.name not in self.killed]
            if living:
                victim = self._random.choice(living)
                self.killed.append(victim.name)
                os.kill(victim.process_id, signal.SIGKILL)


def train(name: str, experiment: Experiment, folder: Path, kills: Kills | None) -> None:
    """Run the training in this process, with or without a cluster."""
    from areal_jax import loop
    from areal_jax.run.cluster import train_on_cluster
    from areal_jax.run.make_plan import make_plan
    from areal_jax.run.start import start

    folder.mkdir(parents=True, exist_ok=True)
    write_config(experiment, folder / CONFIG_FILE)
    plan = make_plan(experiment)
    if kills is None:
        start(plan, folder, resume=False, source=experiment.name)
        return
    logging.getLogger("areal_jax").addHandler(kills)

    async def with_kills(run: Any) -> None:
        killer = asyncio.create_task(kills.kill(run))
        try:
            await loop.train(run, experiment)
        finally:
            killer.cancel()

    asyncio.run(train_on_cluster(plan, folder, with_kills, resume=False, source=experiment.name))
    if kills.unreported:
        raise SystemExit(
            f"{name}: the log does not report the death of {', '.join(kills.unreported)}"
        )


def checked(folder: Path, experiment: Experiment) -> dict[str, Any]:
    """Check the invariants of a finished run, and summarize it.

    Raises:
        SystemExit: a task was skipped or repeated, or a token was too old.
    """
    rollout = experiment.rollout
    if broken := broken_laws(
        folder,
        num_steps=experiment.num_steps,
        groups=rollout.groups_per_batch,
        samples=rollout.samples_per_group,
        max_staleness=rollout.max_staleness or 0,
    ):
        raise SystemExit(f"{folder}: violated invariants: {'; '.join(broken)}")
    rows = read(folder)
    trained, curve = (
        steps(rows),
        [(row["version"], row[names.PASS_AT_1]) for row in rows if names.PASS_AT_1 in row],
    )
    seconds, last = trained[-1]["time_s"] - trained[0]["time_s"], trained[-1]
    return {
        "pass_at_1": curve,
        "samples_per_s": (len(trained) - 1)
        * rollout.groups_per_batch
        * rollout.samples_per_group
        / seconds,
        "rejected": last["rollout/rejected"],
        "engines_lost": last.get("rollout/engines_lost", 0.0),
        "requests_moved": last.get("rollout/requests_moved", 0.0),
        "workers_lost": last.get("rewards/workers_lost", 0.0),
    }


def reinforcement(name: str, settings: Sequence[str]) -> Experiment:
    """Load a reinforcement learning experiment by name."""
    experiment = load_experiment(name, *settings)
    assert isinstance(experiment, Experiment)
    return experiment


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. More than 60 lines: it measures in the order of its docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs") / NAME, help="of the runs")
    parser.add_argument("--steps", type=int, default=50, help="trainer steps per run")
    parser.add_argument(
        "--kills",
        type=int,
        default=20,
        help="number of killed engines and reward workers in the last run",
    )
    parser.add_argument(
        "--every-s",
        type=float,
        nargs=2,
        default=(4.0, 12.0),
        help="range of the random time between two kills, in seconds",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the runs and of the kills")
    parser.add_argument(
        "--seeds", type=int, nargs="+", help="drills: only the run with kills, once per seed"
    )
    parser.add_argument(
        "--load",
        type=int,
        default=0,
        help="number of processes that keep a core busy each during drills",
    )
    parser.add_argument(
        "--most-s", type=float, default=900.0, help="time limit of a drill, in seconds"
    )
    parser.add_argument("--run", choices=list(RUNS), help="run only one of the runs (internal)")
    parser.add_argument(
        "--note", default="", help="note for the row, such as other load of the machine"
    )
    options = parser.parse_args(argv)
    experiments = experiments_of(options, options.seed)
    folders = {name: options.folder / folder_of(name) for name in RUNS}
    if options.run is not None:
        experiment = experiments[options.run]
        os.environ.update(experiment.launch.environment_variables(os.environ))
        prepare(experiment.launch.resolve_placement(experiment.placement))
        kills = None
        if options.run == "cluster, workers killed":
            kills = Kills(options.kills, options.seed, tuple(options.every_s))
        train(options.run, experiment, folders[options.run], kills)
        return
    if options.seeds:
        drill(options)
        return
    import subprocess

    for name, folder in folders.items():
        if not (folder / "report.html").exists():
            # In separate processes, because their numbers of devices differ.
            given = sys.argv[1:] if argv is None else list(argv)
            subprocess.run([sys.executable, __file__, *given, f"--run={name}"], check=True)
    show(
        options,
        {name: checked(folders[name], experiment) for name, experiment in experiments.items()},
    )


def drill(options: argparse.Namespace) -> None:
    """Run with kills under load, once per seed.

    Raises:
        SystemExit: a run does not end in time, or violates an invariant.
    """
    import subprocess
    import time

    from results import append

    name = "cluster, workers killed"
    common = [
        f"--steps={options.steps}",
        f"--kills={options.kills}",
        "--every-s",
        *map(str, options.every_s),
        f"--run={name}",
    ]
    load = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.load)
    ]
    try:
        for number, seed in enumerate(options.seeds):
            folder, began_s = options.folder / f"seed-{seed}", time.monotonic()
            command = [sys.executable, __file__, *common, f"--seed={seed}", f"--folder={folder}"]
            try:
                subprocess.run(command, check=True, timeout=options.most_s)
            except subprocess.TimeoutExpired:
                raise SystemExit(
                    f"seed {seed}: the run has not ended within --most-s={options.most_s:g}"
                ) from None
            seconds = time.monotonic() - began_s
            found = checked(folder / folder_of(name), experiments_of(options, seed)[name])
            settings = {
                "steps": options.steps,
                "kills": options.kills,
                "seed": seed,
                "load": options.load,
            }
            measured = {
                "load_average": os.getloadavg()[1],
                "seconds": seconds,
                "runs": {name: found},
            }
            append(NAME, {"note": options.note, **settings, **measured})
            print(
                (
                    f"drill {number + 1} of {len(options.seeds)}, seed {seed}: ended in "
                    f"{seconds:.0f} s, invariants hold"
                ),
                flush=True,
            )
    finally:
        for process in load:
            process.kill()
            process.wait()


def folder_of(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def experiments_of(options: argparse.Namespace, seed: int) -> dict[str, Experiment]:
    """Return the experiment of each run."""
    common = (
        f"num_steps={options.steps}",
        f"seed={seed}",
        f"evaluation.every_steps={max(1, options.steps // 2)}",
    )
    return {name: reinforcement("aime", (*common, *settings)) for name, settings in RUNS.items()}


def show(options: argparse.Namespace, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the table, append the row and plot the figure."""
    from matplotlib.figure import Figure
    from results import FOLDER, append
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "run", "pass@1", "answers/s", "engines lost", "requests moved", "workers lost", title=NAME
    )
    for name, each in found.items():
        curve = " -> ".join(f"{score:.1%}" for _, score in each["pass_at_1"])
        lost = (f"{each[key]:.0f}" for key in ("engines_lost", "requests_moved", "workers_lost"))
        table.add_row(name, curve, f"{each['samples_per_s']:.1f}", *lost)
    append(
        NAME,
        {
            "note": options.note,
            "steps": options.steps,
            "kills": options.kills,
            "seed": options.seed,
            "runs": found,
        },
    )
    Console().print(table)
    figure = Figure(figsize=(6, 3.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    for name, each in found.items():
        axes.plot(*zip(*each["pass_at_1"], strict=True), marker="o", label=name)
    axes.set(
        xlabel="trainer step",
        ylabel="pass@1 of 512 held-out problems",
        title=f"{options.kills} workers killed in one run",
    )
    axes.legend(frameon=False)
    figure.savefig(FOLDER / f"{NAME}.png")


if __name__ == "__main__":
    main()
