"""--help, --version and shell completion of all commands."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from areal_jax import __version__
from areal_jax.cli import evaluate, plan, report, serve, tinker, train
from areal_jax.cli.completion import completions
from areal_jax.config.aliases import ALIASES
from areal_jax.config.experiment import Experiment, PreferenceExperiment, SFTExperiment
from areal_jax.config.load import load_experiment
from areal_jax.config.overrides import reachable, settings
from areal_jax.errors import ConfigError
from areal_jax.serve.config import ServeConfig
from areal_jax.sim.config import ClusterQuestion

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "areal-train": train,
    "areal-evaluate": evaluate,
    "areal-serve": serve,
    "areal-plan": plan,
    "areal-report": report,
    "areal-tinker": tinker,
}
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def test_every_command_is_a_script_of_the_package() -> None:
    assert set(SCRIPTS) == set(COMMANDS)


@pytest.mark.parametrize("script", COMMANDS)
def test_a_script_runs_its_command(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, _, name = SCRIPTS[script].partition(":")
    code = f"import sys; from {module} import {name}; sys.exit({name}())"
    command = [sys.executable, "-c", code, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == COMMANDS[script].main(["--help"]) == 0, done.stderr
    assert done.stdout == capsys.readouterr().out


@pytest.mark.parametrize("script", COMMANDS)
def test_help_fits_on_one_screen(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMANDS[script].main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: {script} ")
    assert any(line.startswith("  --version ") for line in lines)
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("script", COMMANDS)
def test_version_is_printed(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMANDS[script].main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"areal_jax {__version__} (jax ")


@pytest.mark.parametrize(
    ("topic", "keys"),
    [
        ("lr", ["trainer.optimizer.learning_rate"]),
        # Of Synthetic, Exercises, ReasoningGym and Repositories.
        ("seed", ["seed", *["eval_tasks.seed"] * 4, *["tasks.seed"] * 4]),
        ("rank", ["policy.lora.rank"]),  # of a record that is left out
        ("kl_coef", ["trainer.reference.kl.coefficient"] * 2),  # in the loss, in the reward
    ],
)
def test_help_finds_settings(
    topic: str, keys: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([f"--help={topic}"]) == 0
    shown = capsys.readouterr().out
    found = [line.strip().partition("=")[0] for line in shown.splitlines() if line[2] != " "]
    assert [key for key in found if key in keys] == keys, shown


def test_help_of_a_group_shows_its_settings_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--help=trainer.optimizer", "trainer.optimizer.beta1=0.5"]) == 0
    shown = capsys.readouterr().out
    found = [line.strip() for line in shown.splitlines() if "=" in line]
    assert len(found) == len([key for key in settings(Experiment) if "trainer.optimizer." in key])
    assert all(line.startswith("trainer.optimizer.") for line in found)


def test_help_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--help=qqqq"]) == 2
    assert "--help=qqqq: expected a group, a setting or a word of one" in capsys.readouterr().err


def test_experiments_are_listed_with_their_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--help=experiments"]) == 0
    assert "  countdown         Countdown" in capsys.readouterr().out


def test_every_alias_names_a_setting() -> None:
    configs = (Experiment, SFTExperiment, PreferenceExperiment, ServeConfig, ClusterQuestion)
    exist = {setting.key for config in configs for setting, _ in reachable(settings(config))}
    named = {key for keys in ALIASES.values() for key in keys}
    assert named <= exist
    assert all(alias == alias.lower() and "." not in alias for alias in ALIASES)


@pytest.mark.parametrize(
    ("override", "suggested"),
    [
        ("trainer.lr=1e-5", "trainer.optimizer.learning_rate"),
        ("model=qwen", "policy.path"),
        ("kl_coef=0.1", "trainer.reference.kl.coefficient"),
        ("temperature=1", "engine.temperature or evaluation.temperature"),
        ("beta=0.1", "trainer.reference.kl.coefficient"),
        ("num_generations=8", "rollout.samples_per_group or evaluation.samples_per_task"),
        ("batch_size=8", "rollout.groups_per_batch"),
        ("max_new_tokens=8", "engine.max_new_tokens"),
        ("learning_rate=1", "trainer.optimizer.learning_rate"),
        ("actor.optim.LR=1", "trainer.optimizer.learning_rate"),
    ],
)
def test_names_of_other_trainers_suggest_ours(override: str, suggested: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {suggested}\\?"):
        load_experiment("aime", override)


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("trainer.optimizer.l", ["trainer.optimizer.learning_rate="]),
        ("policy.lora.ra", ["policy.lora.rank="]),
        ("algo", ["algorithm="]),
        ("algorithm=g", ["algorithm=grpo", "algorithm=gspo"]),
        ("tasks=F", ["tasks=Files"]),
        ("metrics.trace=", ["metrics.trace=true", "metrics.trace=false"]),
        ("trainer.remat=f", ["trainer.remat=full"]),
        ("policy.lora.targets=q_proj,k_", ["policy.lora.targets=q_proj,k_proj"]),
        ("unknown=", []),
    ],
)
def test_completion_of_keys_and_values(prefix: str, expected: list[str]) -> None:
    others = {"algorithm": ["grpo", "gspo", "ppo"]}
    assert completions(prefix, settings(Experiment), others) == expected


def test_shell_completes_without_loading_jax(tmp_path: Path) -> None:
    line = "areal-train --exp=sft examples_per_"
    code = (
        "import sys; sys.meta_path.insert(0, type('NoJax', (), {'find_spec': staticmethod("
        "lambda name, *_: sys.exit('jax was imported') if name == 'jax' else None)})); "
        "from areal_jax.train import main; main()"
    )
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "completions"),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "completions").read_text().split() == ["examples_per_batch="]
