"""The command line: what it prints, what it refuses, and that it runs from anywhere."""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from areal_jax.api.run_folders import make_unique, resume_advice
from areal_jax.checkpoint.recovery import Columns
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.cli.train import main
from areal_jax.config.load import experiment_names, find_experiment, load_experiment, write_config
from areal_jax.config.overrides import settings
from areal_jax.data.policy_files import EMBEDDED
from areal_jax.run import start as start_module
from areal_jax.run.claim import Writer

ROOT = Path(__file__).parents[2]


def train(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, which sees neither conftest's devices nor the
    checkout's folder."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS")
    }
    command = [sys.executable, "-m", "areal_jax.train", *arguments]
    return subprocess.run(
        command,
        cwd=cwd,
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def commands(text: str) -> list[list[str]]:
    """Arguments of every `areal_jax.train` command in a text; a backslash continues a line."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [
        shlex.split(line, comments=True)
        for line in re.findall(r"^ .*\bareal-train (.*)", joined, re.MULTILINE)
    ]


def test_help_lists_every_setting_and_choice_from_any_folder(tmp_path: Path) -> None:
    done = train("--help=all", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for setting in settings(load_experiment("aime")).values():
        assert f"{setting.key}=" in done.stdout
        assert setting.doc.split()[0] in done.stdout
    for text in (
        "with tasks=Files",
        "tasks.path=(required)",
        "with trainer.loss=PPO",
        "one of recompute, keep",
        "aime_1p5b",
    ):
        assert text in done.stdout


def test_help_of_an_experiment_shows_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--exp=aime_1p5b", "--help=all", "seed=77"]) == 0
    shown = capsys.readouterr().out
    assert "values of aime_1p5b" in shown
    assert "seed=77\n" in shown
    assert "rollout.groups_per_batch=512\n" in shown
    assert "trainer.advantages=BatchNormalized\n" in shown


@pytest.mark.slow
def test_dry_run_prints_settings_and_plan_and_writes_nothing(tmp_path: Path) -> None:
    done = train(
        "--exp=aime",
        "--dry-run",
        "placement.simulated_devices=4",
        "rollout.max_staleness=none",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "rollout.max_staleness=none\n" in done.stdout
    # Three quarters of four devices decode.
    assert re.search(r"devices +1 \+ 3 cpu\n", done.stdout)
    assert re.search(
        r"train mesh +data 1 x fsdp 1 x expert 1 x context 1 x tensor 1\n", done.stdout
    )
    assert re.search(r"rollout mesh +data 3 x tensor 1\n", done.stdout)
    assert "KV caches" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--exp=aime", "rollout.group_per_batch=3"], "rollout.groups_per_batch"),
        (["--exp=aime", "seed=ten"], "expected int, found 'ten'"),
        (["--exp=aim"], "known names: aime"),
        (["--exp=missing/file.py"], "no experiment 'missing/file.py'"),
        (["--exp=aime", "--seed=3"], "without dashes"),
        (["seed=3"], "--exp=NAME"),
        (["--exp=aime", "--config=config.json"], "give one"),
        (["--config=missing.json"], "missing.json: cannot be read"),
        (["--resume=missing"], "nothing to resume"),
        (["--resume=missing", "--run-folder=other"], "give one"),
        (["--resume", "seed=3"], "nothing to resume"),
        (["--exp=aime", "--dry-run", "policy.path=./missing"], "./missing"),
        (["--exp=aime", "--dry-run", "tasks=Files", "tasks.path=missing.jsonl"], "missing.jsonl"),
        (["--exp=aime", "--dry-run", "placement.train_devices=99"], "placement.train_devices"),
        (["--exp=aime", "--dry-run", "engine.max_new_tokens=1000000"], "engine.max_new_tokens"),
        (["--exp=aime", "--dry-run", "rewards.form=("], "rewards.form=(: error"),
        (
            ["--exp=aime", "--dry-run", "workflow=Agent", "workflow.command=/no/such -x"],
            "workflow.command=/no/such -x: expected",
        ),
        (
            ["--exp=aime", "--dry-run", "workflow=Agent", "workflow.command='"],
            "workflow.command=': No closing quotation",
        ),
        (
            ["--exp=aime", "--dry-run", "rewards.function=missing.py:grader"],
            "rewards.function=missing.py:grader: FileNotFoundError",
        ),
        (
            [
                "--exp=aime",
                "--dry-run",
                "workflow=ToolUse",
                "workflow.tools.names=search",
                "workflow.tools.documents=missing",
            ],
            "workflow.tools.documents=missing: ",
        ),
    ],
)
@pytest.mark.slow
def test_bad_input_is_one_message_and_exit_code_2(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("areal_jax: ")
    assert said in printed.err
    assert list(tmp_path.iterdir()) == []


def test_bad_input_shows_no_traceback(tmp_path: Path) -> None:
    done = train("--exp=aime", "sede=3", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "areal_jax: unknown setting sede; did you mean seed?\n"


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="the compiler is installed")
@pytest.mark.slow
def test_compile_for_without_the_compiler_says_what_to_install(tmp_path: Path) -> None:
    done = train("--exp=aime", "--compile-for=v5e:2x2", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'areal-jax[tpu]'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("experiment = 1 / 0", "ZeroDivisionError: division by zero"),
        ("experiment = (", "SyntaxError: '(' was never closed"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_error_in_an_experiment_file_keeps_file_and_traceback(
    code: str, error: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(code)
    assert main([f"--exp={path}"]) == 2
    first, *trace = capsys.readouterr().err.splitlines()
    assert first.startswith(f"areal_jax: {path}: {error}")
    assert f'File "{path}", line 1' in trace[0] + trace[1]  # nothing of this package before it


def started(folder: Path, *overrides: str) -> None:
    """A run of which one row was written."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(load_experiment("aime", *overrides), folder / "config.json")
    (folder / "metrics.jsonl").write_text('{"version":0}\n')


def test_folder_with_a_run_is_not_overwritten(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    started(tmp_path)
    assert main(["--exp=aime", f"--run-folder={tmp_path}"]) == 2
    assert f"--resume={tmp_path}" in capsys.readouterr().err


@pytest.mark.slow
def test_resume_takes_the_newest_run_of_the_experiment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for age_s, (run, seed) in enumerate(
        {"aime-b": 11, "aime-a": 22, "gsm8k-z": 33, "aime-c": 44}.items()
    ):
        folder = tmp_path / "runs" / run
        started(folder, f"seed={seed}")
        os.utime(folder, (1000 - age_s, 1000 - age_s))
    assert main(["--exp=aime", "--resume", "--dry-run", "num_steps=7"]) == 0
    shown = capsys.readouterr().out
    assert "seed=11\n" in shown
    assert "num_steps=7\n" in shown
    assert f"run folder: {Path('runs/aime-b')} " in shown
    assert main(["--resume=runs/aime-c", "--dry-run"]) == 0
    assert "seed=44\n" in capsys.readouterr().out


@pytest.mark.slow
def test_failed_start_is_not_a_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    failed = tmp_path / "runs" / "aime-failed"
    started(tmp_path / "runs" / "aime-begun", "seed=11")
    started(failed, "seed=22")
    (failed / "metrics.jsonl").write_text("")
    (failed / "checkpoints" / "1.orbax-checkpoint-tmp-0").mkdir(parents=True)
    os.utime(failed.parent / "aime-begun", (1000, 1000))
    assert main(["--exp=aime", "--resume", "--dry-run"]) == 0
    assert "seed=11\n" in capsys.readouterr().out
    assert main(["--exp=aime", f"--run-folder={failed}", "--dry-run"]) == 0
    (failed / "checkpoints" / "1").mkdir()
    assert main(["--exp=aime", f"--run-folder={failed}", "--dry-run"]) == 2


@pytest.mark.slow
def test_refused_resume_keeps_the_run_settings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    started(folder)
    store = CheckpointStore(folder / "checkpoints", keep=1)
    store.save(1, {"params": {"embedding": np.zeros((2, 3), np.float32)}}, Columns({}, {}))
    store.close()
    before = (folder / "config.json").read_text()
    assert main([f"--resume={folder}", "policy.lora.rank=4"]) == 2
    assert "holds another policy" in capsys.readouterr().err
    assert (folder / "config.json").read_text() == before


def test_default_folders_do_not_collide(tmp_path: Path) -> None:
    wanted = tmp_path / "runs" / "aime-20260101-000000"
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(make_unique, [wanted] * 8))
    assert sorted(folder.name for folder in made) == [
        wanted.name,
        *(f"{wanted.name}-{number}" for number in range(2, 9)),
    ]


@pytest.mark.slow
def test_a_full_disk_is_one_message_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A file of more than 64 bytes is refused from here on, as on a full disk.
    monkeypatch.chdir(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        assert main(["--exp=aime", f"--run-folder={tmp_path / 'run'}"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(
        f"areal_jax: {tmp_path / 'run' / 'claim.json'}: File too large; make room there"
    )


@pytest.mark.slow
def test_a_lost_claim_is_one_message_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def write_with_an_earlier_token(_plan: object, run_folder: Path, **_options: object) -> None:
        Writer(run_folder, "token of an earlier claim")

    monkeypatch.setattr(start_module, "start", write_with_an_earlier_token)
    assert main(["--exp=aime", f"--run-folder={tmp_path / 'run'}"]) == 1
    (message,) = capsys.readouterr().err.splitlines()[-1:]
    assert message.startswith(f"areal_jax: {tmp_path / 'run'} is claimed by")
    assert message.endswith("nothing is written")


def test_resume_advice_names_the_newest_checkpoint(tmp_path: Path) -> None:
    assert resume_advice(tmp_path) == "no checkpoint was saved, so there is nothing to resume"
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    assert resume_advice(tmp_path).endswith(
        f"areal-train --resume={tmp_path} resumes from the checkpoint of version 7"
    )


@pytest.mark.parametrize(
    "broken",
    ["none", "half", "noise", "size", "index"],
    ids=["none", "half a file", "noise", "another size", "a file too few"],
)
@pytest.mark.slow
def test_broken_weights_are_one_message_and_exit_code_2(
    broken: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(EMBEDDED, policy)
    weights = policy / "model.safetensors"
    data = weights.read_bytes()
    if broken == "half":
        weights.write_bytes(data[: len(data) // 2])
    elif broken == "noise":
        weights.write_bytes(np.random.default_rng(1).bytes(10_000))
    elif broken == "size":
        config = json.loads((policy / "config.json").read_text())
        (policy / "config.json").write_text(
            json.dumps(config | {"hidden_size": 2 * config["hidden_size"]})
        )
    else:
        weights.unlink()
        if broken == "index":
            index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
            (policy / "model.safetensors.index.json").write_text(json.dumps(index))
    run = tmp_path / "run"
    assert main(["--exp=aime", f"policy.path={policy}", f"--run-folder={run}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("areal_jax: ")
    assert "policy" in error
    assert list(run.iterdir()) == []


@pytest.mark.parametrize("folder", ["/etc/passwd", "/proc/x"])
@pytest.mark.slow
def test_invalid_run_folder_error_names_its_option(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--exp=aime", f"--run-folder={folder}"]) == 2
    assert capsys.readouterr().err.startswith(
        f"areal_jax: --run-folder={folder}: cannot be written to ("
    )


@pytest.mark.parametrize("name", experiment_names())
def test_an_experiments_docstring_says_how_to_run_it(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    docstring = ast.get_docstring(ast.parse(find_experiment(name).read_text())) or ""
    assert "Hardware: " in docstring
    found = commands(docstring)
    assert any(f"--exp={name}" in arguments for arguments in found)
    for arguments in found:
        assert main([*arguments, "--help"]) == 0, capsys.readouterr().err
