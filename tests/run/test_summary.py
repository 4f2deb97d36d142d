"""The end of a run on the terminal: a table of its outcome, and the commands that follow."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from areal_jax.metrics import names
from areal_jax.run.summary import next_commands, shell_command, summary_lines


def lines_of(folder: Path, rows: list[dict[str, float]], **given: object) -> dict[str, str]:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    times = {"elapsed_s": 0.0, "stage_s": {}, "findings": {}} | given
    lines = summary_lines(folder, 40, **times)  # pyright: ignore[reportArgumentType]
    return {line[:12].strip(): line[12:] for line in lines}


def test_every_figure_names_its_steps_or_versions(tmp_path: Path) -> None:
    rows = [
        {"version": version, names.REWARD: float(version), names.ROLLOUT_TOKENS_PER_S: 1000.0}
        for version in range(24)
    ]
    scores = [(0, 0.25), (12, 0.5), (12, 0.375), (24, 0.5)]
    rows += [{"version": version, names.PASS_AT_1: score} for version, score in scores]
    found = lines_of(
        tmp_path,
        rows,
        elapsed_s=125.0,
        stage_s={"loading": 0.2, "compiling": 61.0},
        findings={"no_signal": 20},
    )
    assert found == {
        "steps": "24 of 40",
        "time": "2:05, of which compiling 1:01",
        # A quarter of 24 steps: the means of rewards 0 to 5 and of 18 to 23.
        "reward": "2.5 in steps 1 to 6, 20.5 in steps 19 to 24",
        "pass@1": "25.0% of version 0, 50.0% of version 24",
        "throughput": "rollout 1000 tok/s",
        "health": "no_signal since step 20",
    }


def test_version_that_was_evaluated_twice_has_its_last_score(tmp_path: Path) -> None:
    rows = [{"version": 7, names.PASS_AT_1: score} for score in (0.25, 0.5)]
    assert lines_of(tmp_path, rows)["pass@1"] == "50.0% of version 7"


def test_run_without_a_step_has_neither_reward_nor_scores(tmp_path: Path) -> None:
    assert lines_of(tmp_path, []) == {"steps": "0 of 40", "time": "0:00"}


def test_next_commands_need_a_checkpoint(tmp_path: Path) -> None:
    assert list(next_commands(tmp_path)) == []
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    evaluate, serve = next_commands(tmp_path)
    assert evaluate.endswith(shell_command("evaluate", f"checkpoint={tmp_path}"))
    assert serve.endswith(shell_command("serve", f"model={tmp_path}"))


def test_commands_are_relative_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    assert shell_command("serve", "model=a b") == ("venv/bin/python -m areal_jax.serve 'model=a b'")
    (programs / "areal-serve").touch(mode=0o755)
    assert shell_command("serve") == "venv/bin/areal-serve"
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin")
    assert shell_command("serve") == "areal-serve"
