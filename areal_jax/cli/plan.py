"""`areal-plan model=NAME devices=N context=TOKENS [a=b ...]`: estimate the throughput
of a cluster and its best split.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from areal_jax.cli.arguments import answer, config_parser, fail
from areal_jax.cli.compile_table import compile_for
from areal_jax.cli.settings_help import wrap_names
from areal_jax.config.experiment import Experiment
from areal_jax.config.overrides import assign, build, from_text, parse_overrides, settings
from areal_jax.engine.config import EngineConfig
from areal_jax.errors import ConfigError
from areal_jax.json_files import read_json
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.config_keys import SETTING
from areal_jax.models.known import KNOWN, known_shape
from areal_jax.parallel.config import PlacementConfig
from areal_jax.sim.config import ClusterQuestion
from areal_jax.sim.hardware import DEVICES
from areal_jax.sim.planner import ClusterPlan, plan_cluster
from areal_jax.trainer.config import TrainerConfig

USAGE = f"""\
usage: areal-plan model=NAME devices=N context=TOKENS [a=b ...]

Simulate reinforcement learning on a cluster: the real gate, buffer and controller under a simulated
clock, devices by their data sheets. Prints the best split, throughput, hours and the bottleneck. No
device and no weights are needed.

  model=NAME            a folder with a config.json, or one of
                        {wrap_names(KNOWN)}
  device=NAME           {", ".join(DEVICES)}
  --compile-for=SLICE   instead compile the programs for TPU slices or GPU nodes that are not
                        there, such as v5p:8x8x8 or 2xh200:8, and print memory and bounds;
                        --compile-all: all programs
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0; 1 where a compiled program does not fit; 2 for invalid input, with one
        message on stderr.
    """
    parser = config_parser(ClusterQuestion)
    parser.add_argument("--compile-for", metavar="SLICE")
    parser.add_argument("--compile-all", action="store_true")
    try:
        command = parser.parse(argv)
        if answer(command, USAGE, ClusterQuestion):
            return 0
        given = parse_overrides(command.overrides)
        question = build(ClusterQuestion, assign(given, settings(ClusterQuestion), from_text))
        model = find_model(question.model, question.ignore_config_keys)
        if command.compile_for:
            name, ignored = question.draft_policy, question.ignore_config_keys
            return compile_for(
                experiment_of(question),
                command.compile_for,
                model=model,
                draft=find_model(name, ignored, "draft_policy") if name else None,
                compiles_all=command.compile_all,
            )
        found = plan_cluster(question, model)
    except ConfigError as error:
        return fail(f"{error}", 2)
    print(found.text())
    if question.figure:
        plot(found, Path(question.figure))
        print(f"{'figure':<12}  {question.figure}")
    return 0


def experiment_of(question: ClusterQuestion) -> Experiment:
    """The settings on which the programs of a run on a cluster depend: rows of the maximum length,
    one for each micro-batch, and half of the devices to decode where their number is not given. A
    single device does both.

    Raises:
        ConfigError: no device is left to train.
    """
    rollout = question.rollout_devices or max(1, question.devices // 2)
    train = question.devices - rollout if question.devices > 1 else 1
    if train < 1:
        raise ConfigError(
            f"rollout_devices={rollout} of devices={question.devices}: expected at least one "
            "device to train"
        )
    shards = question.devices_per_engine or 1
    return Experiment(
        name=question.model,
        num_steps=question.steps,
        engine=EngineConfig(
            num_slots=question.slots * max(1, rollout // shards),
            max_prompt_tokens=question.prompt_tokens,
            max_new_tokens=question.context - question.prompt_tokens,
            on_update=question.on_update,
            draft_tokens=question.draft_tokens,
            draft_policy=question.draft_policy,
        ),
        trainer=TrainerConfig(rows_per_micro_batch=1),
        placement=PlacementConfig(
            train_devices=train, rollout_devices=rollout, rollout_tensor=shards
        ),
    )


def find_model(name: str, ignored_keys: Sequence[str] = (), setting: str = "model") -> ModelConfig:
    """The shape of a policy known by name, or of a folder's config.json.

    Raises:
        ConfigError: neither is found; the message lists the names.
    """
    path = Path(name).expanduser() / "config.json"
    try:
        return (
            ModelConfig.from_hf(read_json(path), str(path), ignored_keys)
            if path.is_file()
            else known_shape(name)
        )
    except ValueError as error:
        message = str(error).replace(SETTING, "ignore_config_keys")
        raise ConfigError(
            f"{setting}={name}: {message}; or give a folder with a config.json"
        ) from None


def plot(found: ClusterPlan, path: Path) -> None:
    """Plot throughput by split, and shares of time of the best split."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    rollout = [candidate.rollout_devices for candidate in found.candidates]
    left.plot(
        rollout,
        [candidate.tokens_per_s for candidate in found.candidates],
        marker="o",
        color="#2563a8",
    )
    left.plot(
        found.best.rollout_devices,
        found.best.tokens_per_s,
        marker="*",
        markersize=16,
        color="#c2410c",
    )
    left.axhline(
        found.synchronous.tokens_per_s, color="#8a8f98", linestyle="--", label="synchronous at best"
    )
    question = found.question
    left.set(
        title=f"{question.model}, {question.devices} x {question.device}, {question.context} "
        f"tokens",
        xlabel="devices that decode",
        ylabel="tokens trained per second",
        ylim=(0, None),
    )
    left.legend(frameon=False, loc="lower right")
    shares = found.best.outcome.shares
    rows = [
        ("trainer busy", 1 - found.best.outcome.trainer_waits),
        *((f"engines: {name}", of) for name, of in shares.items()),
    ]
    right.barh(
        [name for name, _ in rows],
        [100 * of for _, of in rows],
        color=["#c2410c", *["#2563a8"] * len(shares)],
    )
    right.set(title="share of time at the best split", xlabel="%", xlim=(0, 100))
    right.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
