"""The planner's command line: what it prints, draws and refuses. No jax is imported for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal_jax.cli.plan import experiment_of, find_model, main
from areal_jax.data.policy_files import EMBEDDED
from areal_jax.errors import ConfigError
from areal_jax.sim.config import ClusterQuestion

SMALL = (
    "devices=3",
    "context=1024",
    "groups_per_batch=4",
    "samples_per_group=2",
    "slots=4",
    "steps=10",
)


def test_plan_is_printed_and_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "plan.png"
    assert main(["model=qwen2.5-0.5b", *SMALL, "device=h800", f"figure={figure}"]) == 0
    shown = capsys.readouterr().out
    assert "0.49 B parameters" in shown and "hours for 10 steps" in shown
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (
            ["model=qwen2.5-0.5b", *SMALL, "rollout_devices=3", "--compile-for=h100:3"],
            "rollout_devices=3 of devices=3: expected at least one device to train",
        ),
        (
            ["model=gpt-5", *SMALL],
            "model=gpt-5: expected the name of a known policy (qwen2.5-0.5b",
        ),
        (["model=qwen2.5-32b", *SMALL], "devices=3 are too few for model=qwen2.5-32b"),
        (["model=qwen2.5-0.5b", *SMALL, "median_length=-5"], "found median_length=-5"),
        (["model=qwen2.5-0.5b", "devices=many"], "devices=many: expected int"),
        (["model=qwen2.5-0.5b", *SMALL, "gpus=3"], "unknown setting gpus"),
    ],
)
def test_bad_input_is_refused_in_one_message(
    arguments: list[str], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert reported in capsys.readouterr().err


def test_help_lists_settings_models_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help=all"]) == 0
    shown = capsys.readouterr().out
    for word in ("max_staleness=4", "r1-distill-qwen-7b", "TPU v5p", "context=(required)"):
        assert word in shown


def test_a_folder_with_a_config_is_a_model_too() -> None:
    assert find_model(str(EMBEDDED)).num_params < 1e7


def test_an_unknown_key_of_a_folder_names_the_planners_setting(tmp_path: Path) -> None:
    config = json.loads((EMBEDDED / "config.json").read_text()) | {"frobnicate": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"frobnicate=2 is not a known key.* set ignore_config_keys=frobnicate;"
    ):
        find_model(str(tmp_path))
    assert find_model(str(tmp_path), ("frobnicate",)).num_params < 1e7


@pytest.mark.parametrize(("devices", "train", "rollout"), [(1, 1, 1), (3, 2, 1), (8, 4, 4)])
def test_half_of_the_devices_decode_and_a_single_one_is_shared(
    devices: int, train: int, rollout: int
) -> None:
    question = ClusterQuestion(model="qwen2.5-0.5b", devices=devices, context=1024)
    placement = experiment_of(question).placement
    assert (placement.train_devices, placement.rollout_devices) == (train, rollout)


def test_planning_imports_no_jax() -> None:
    code = "import sys, areal_jax.plan; sys.exit('jax' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False
        ).returncode
        == 0
    )
