"""The command line that writes a run's report again."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from areal_jax.cli.report import main
from areal_jax.metrics.description import write_description
from areal_jax.run.claim import claimed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    rows = [f'{{"version":{version},"trainer/reward":0.{version}}}\n' for version in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(rows))
    write_description(tmp_path, "a headline", {"seed": 7}, "1 cpu")
    return tmp_path


def test_report_of_an_ended_run_is_written_again(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_folder / "report.html").write_text("old")
    assert main([str(run_folder)]) == 0
    assert capsys.readouterr().out == f"report: {run_folder / 'report.html'}\n"
    page = (run_folder / "report.html").read_text()
    assert "a headline" in page and "trainer/reward" in page
    assert (run_folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_report_of_a_torn_row_leaves_it_out(run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"version":3,"trainer/torn"')
    assert main([str(run_folder)]) == 0
    assert "trainer/torn" not in (run_folder / "report.html").read_text()


def test_two_runs_are_compared_in_one_page(
    run_folder: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "metrics.jsonl").write_text((run_folder / "metrics.jsonl").read_text())
    assert main([str(run_folder), str(other)]) == 0
    assert capsys.readouterr().out == f"report: {run_folder / 'comparison.html'}\n"
    assert main([str(run_folder), str(other), f"--out={other / 'both.html'}"]) == 0
    for page in (run_folder / "comparison.html", other / "both.html"):
        assert f'"name":"{run_folder.name}"' in page.read_text()
        assert f'"name":"{other.name}"' in page.read_text()
    assert not (run_folder / "report.html").exists()


def test_report_of_a_claimed_folder_shows_running(run_folder: Path) -> None:
    with claimed(run_folder):
        assert main([str(run_folder)]) == 0
        assert '"state":"running"' in (run_folder / "report.html").read_text()
    assert main([str(run_folder)]) == 0
    assert '"state":"stopped"' in (run_folder / "report.html").read_text()


def test_report_runs_as_a_module_without_loading_jax(run_folder: Path) -> None:
    code = (
        "import runpy, sys; sys.argv = ['report', sys.argv[1]]\n"
        "try: runpy.run_module('areal_jax.report', run_name='__main__')\n"
        "finally: assert 'jax' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run_folder)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"report: {run_folder / 'report.html'}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a run folder, found none"),
        (["missing"], "missing: expected a run folder with metrics.jsonl"),
        (["--draw", "a"], "unrecognized arguments: --draw; give one or more run folders"),
        (["--out=x", "a"], "--out is the file of a comparison: give several run folders"),
        (["--live", "--port=70000", "a"], "--port=70000: expected a number from 0 to 65535"),
    ],
)
def test_invalid_arguments_are_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("areal_jax: ") and message in line


def test_files_of_another_program_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"loss":1}\n')
    assert main([str(tmp_path)]) == 2
    assert "expected the files of a run" in capsys.readouterr().err


def test_full_disk_is_one_line_and_status_1(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        assert main([str(run_folder)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (line,) = capsys.readouterr().err.splitlines()
    assert "learning_curve.png: File too large; make room there" in line
