"""The evaluate command: from whatever holds a policy, twice the same, resumed after a kill, and
what it refuses."""

from __future__ import annotations

import ast
import asyncio
import json
import queue
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chz
import pytest
import scripted_server
from saved_runs import adapter, embedded_params, save_run, save_run_and_export
from scripted_server import Response

from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.cli.evaluate import main
from areal_jax.config.load import experiment_names, find_experiment, load_experiment, write_config
from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.evaluation import remote as asked
from areal_jax.models import hf, lora
from areal_jax.run.serving import engine_backend
from areal_jax.serve.app import App, listening
from areal_jax.serve.config import ServeConfig

TOKEN = "secret"
ROOT = Path(__file__).parents[2]

SMALL = (
    *(
        "--exp=aime",
        "evaluation.num_tasks=6",
        "evaluation.samples_per_task=3",
        "engine.num_slots=8",
        "engine.prefill_chunk_tokens=32",
    ),
    *("engine.max_new_tokens=40", "placement.rollout_devices=1", "metrics.progress=false"),
)


def evaluate(folder: Path, *arguments: str) -> dict[str, Any]:
    """What the command writes into results.json."""
    assert main([*SMALL, f"--folder={folder}", *arguments]) == 0
    return json.loads((folder / "results.json").read_text())


def figures(results: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in results.items() if name != "settings"}


def texts(folder: Path) -> dict[int, list[str]]:
    rows = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    return {row["place"]: [answer["text"] for answer in row["answers"]] for row in rows}


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded policy's evaluation."""
    folder = tmp_path_factory.mktemp("embedded") / "evaluation"
    evaluate(folder)
    return folder


@pytest.mark.slow
def test_the_files_of_an_evaluation_agree_with_each_other(embedded: Path) -> None:
    results = json.loads((embedded / "results.json").read_text())
    rows = [json.loads(line) for line in (embedded / "samples.jsonl").read_text().splitlines()]
    assert sorted(row["place"] for row in rows) == list(range(6))
    right = sum(answer["grade"] == "correct" for row in rows for answer in row["answers"])
    assert results["pass_at"]["1"]["value"] == pytest.approx(right / 18)
    assert results["pass_at"].keys() == results["majority_at"].keys() == {"1", "2"}
    assert results["grades"]["correct"] == right > 0, "this policy solves some of its problems"
    assert len((embedded / "problems.csv").read_text().splitlines()) == 1 + 6
    page = (embedded / "report.html").read_text()
    for text in ("pass@1", "maj@2", rows[0]["task"], "tokens/s", "uPlot"):
        assert text in page
    assert not re.search(r'(src|href)="(?!data:)', page), "the page needs nothing but itself"
    assert not any(name in json.dumps(results) for name in ("seconds", "time_s", str(embedded)))


@pytest.mark.slow
def test_repeated_and_resumed_evaluations_are_equal(embedded: Path, tmp_path: Path) -> None:
    evaluate(tmp_path / "again")
    again = tmp_path / "again" / "samples.jsonl"
    assert (tmp_path / "again" / "results.json").read_bytes() == (
        embedded / "results.json"
    ).read_bytes()
    place = random.Random(0).randrange(again.stat().st_size // 4, again.stat().st_size)
    again.write_bytes(again.read_bytes()[:place])
    evaluate(tmp_path / "again")
    for name in ("results.json", "problems.csv"):
        assert (tmp_path / "again" / name).read_bytes() == (embedded / name).read_bytes()


@pytest.mark.slow
def test_a_problem_that_does_not_fit_counts_as_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"problem": f"Find {number} + 1.", "answer": str(number + 1)} for number in range(7)]
    rows.append({"problem": "1 + 1 + " * 60, "answer": "61"})
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = (
        f"data={tmp_path / 'data.jsonl'}",
        "evaluation.num_tasks=8",
        "engine.max_prompt_tokens=64",
    )
    found = evaluate(tmp_path / "first", *command)
    assert (
        "1 of 8 prompts of eval_tasks are longer than engine.max_prompt_tokens=64"
        in capsys.readouterr().err
    )
    assert (found["num_tasks"], found["num_samples"], found["failed"]) == (
        8,
        21,
        {"InvalidRequest": 1},
    )
    right = sum(problem["num_correct"] for problem in found["problems"])
    assert found["pass_at"]["1"]["value"] == pytest.approx(right / 3 / 8)
    assert sum(family["num_tasks"] for family in found["families"].values()) == 8
    last = (tmp_path / "first" / "problems.csv").read_text().splitlines()[-1]
    assert "engine.max_prompt_tokens=64" in last
    assert "InvalidRequest" in (tmp_path / "first" / "report.html").read_text()
    # What goes on with an evaluation asks it again, and counts it the same.
    before = (tmp_path / "first" / "results.json").read_bytes()
    evaluate(tmp_path / "first", *command)
    assert (tmp_path / "first" / "results.json").read_bytes() == before
    # With nothing set, there is room for it.
    assert evaluate(tmp_path / "second", *command[:2])["failed"] == {}


@pytest.mark.slow
def test_killed_evaluation_is_resumed(
    embedded: Path, tmp_path: Path, of_a_command: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "areal_jax.evaluate", *SMALL, f"--folder={tmp_path}"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=of_a_command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    samples, deadline_s = tmp_path / "samples.jsonl", time.monotonic() + 240.0
    while not samples.exists() or not samples.stat().st_size:
        assert process.poll() is None and time.monotonic() < deadline_s, process.communicate()[0]
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    evaluate(tmp_path)
    assert (tmp_path / "results.json").read_bytes() == (embedded / "results.json").read_bytes()


@pytest.mark.slow
def test_other_settings_and_other_tasks_are_refused_by_name(
    embedded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (embedded / "samples.jsonl").read_bytes()
    for change, said in {
        "evaluation.samples_per_task=4": "evaluation.samples_per_task is 3 there and 4 here",
        "eval_tasks.seed=5": "tasks is ",
        "seed=9": "seed is 1 there and 9 here",
    }.items():
        assert main([*SMALL, f"--folder={embedded}", change]) == 2
        assert said in capsys.readouterr().err
    assert (embedded / "samples.jsonl").read_bytes() == before


@pytest.fixture(scope="module")
def drifted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder whose checkpoints hold the embedded policy, a little moved, as full parameters
    and as an export."""
    return save_run_and_export(tmp_path_factory.mktemp("run"))


@pytest.mark.slow
def test_a_run_and_its_export_score_the_same(drifted: Path, embedded: Path, tmp_path: Path) -> None:
    run = evaluate(tmp_path / "run", f"checkpoint={drifted}")
    export = evaluate(tmp_path / "export", f"checkpoint={drifted / 'policy'}")
    assert figures(run) == figures(export)
    assert texts(tmp_path / "run") == texts(tmp_path / "export") != texts(embedded)
    assert (run["settings"]["version"], export["settings"]["version"]) == (3, 0)
    # An older version is another policy: here one that has forgotten everything.
    older = evaluate(tmp_path / "older", f"checkpoint={drifted / CHECKPOINTS / '2'}")
    assert older["settings"]["version"] == 2
    assert older["pass_at"]["1"]["value"] == 0.0


@pytest.mark.slow
def test_adapter_run_scores_as_its_merged_policy(tmp_path: Path) -> None:
    policy, found = adapter()
    save_run(tmp_path / "run", found, "policy.lora.rank=2")
    hf.save(
        tmp_path / "run" / "policy", policy, lora.merge(policy, embedded_params(), found), EMBEDDED
    )
    # Merged matrices round otherwise than two products: the likeliest tokens are the same all the
    # same.
    run = evaluate(
        tmp_path / "of run", f"checkpoint={tmp_path / 'run'}", "evaluation.temperature=0"
    )
    merged = evaluate(
        tmp_path / "of merged",
        f"checkpoint={tmp_path / 'run' / 'policy'}",
        "evaluation.temperature=0",
    )
    assert texts(tmp_path / "of run") == texts(tmp_path / "of merged")
    assert figures(run) == figures(merged)


@pytest.mark.slow
def test_evaluation_of_a_run_uses_its_settings(
    drifted: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([f"checkpoint={drifted}", *SMALL[1:], "evaluation.num_tasks=2"]) == 0
    (folder,) = (tmp_path / "evaluations").iterdir()
    assert folder.name.startswith(f"drift-{drifted.name}-v3-")
    assert json.loads((folder / "results.json").read_text())["settings"]["seed"] == 7


@pytest.mark.slow
def test_benchmark_file_is_evaluated_completely(tmp_path: Path) -> None:
    rows = [
        {"question": f"Ann has {n} eggs and buys 2. How many?", "answer": f"{n} + 2\n#### {n + 2}"}
        for n in range(3)
    ]
    data = tmp_path / "gsm8k.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [argument for argument in SMALL if not argument.startswith("evaluation.")]
    assert (
        main(
            [*arguments, f"data={data}", "prompt.suffix= Box it.", f"--folder={tmp_path / 'found'}"]
        )
        == 0
    )
    results = json.loads((tmp_path / "found" / "results.json").read_text())
    assert [problem["task"] for problem in results["problems"]] == [
        f"gsm8k.jsonl:{n}" for n in (1, 2, 3)
    ]
    assert [problem["expected"] for problem in results["problems"]] == ["2", "3", "4"]
    assert results["settings"]["evaluation.num_tasks"] is None


@contextmanager
def serving() -> Iterator[str]:
    """The URL of the package's own server, with the embedded policy and a token, while it listens
    in a thread."""
    engine = chz.replace(
        load_experiment("aime").engine, num_slots=8, max_prompt_tokens=64, max_new_tokens=40
    )
    config = ServeConfig(engine=engine, devices=1)
    loop, urls, stop = asyncio.new_event_loop(), queue.SimpleQueue[str | None](), asyncio.Event()

    async def serve() -> None:
        async with (
            engine_backend(config, TOKEN) as source,
            listening(App(source, config.limits), "127.0.0.1", 0, 10.0) as port,
        ):
            urls.put(f"http://127.0.0.1:{port}/v1")
            await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            loop.close()
            urls.put(None)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        url = urls.get(timeout=240)
        assert url is not None, "the server did not start"
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)


@pytest.mark.slow
def test_server_answers_as_tokens_or_text_and_requires_its_key(
    embedded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A policy that is not here: nobody knows the server's tokens, so that it is asked in words.
    strange = "policy.path=./missing"
    with serving() as url:
        for token in ("wrong", ""):
            monkeypatch.setenv("OPENAI_API_KEY", token)
            assert main([*SMALL, f"checkpoint={url}"]) == 2
            assert (
                "the server refused the request (401" in (said := capsys.readouterr().err)
                and "set OPENAI_API_KEY" in said
            )
        monkeypatch.setenv("OPENAI_API_KEY", TOKEN)
        tokens = evaluate(tmp_path / "tokens", f"checkpoint={url}")
        words = evaluate(tmp_path / "words", f"checkpoint={url}", strange, "evaluation.num_tasks=3")
        assert main([*SMALL, f"checkpoint={url}", strange, "workflow=MultiTurn"]) == 2
        assert "which workflow=MultiTurn needs" in capsys.readouterr().err
    assert figures(tokens) == figures(json.loads((embedded / "results.json").read_text()))
    assert (tokens["settings"]["asked in"], tokens["settings"]["model"]) == ("tokens", "embedded")
    sampled_with = "top_p=1, top_k=0, min_p=0, repetition_penalty=1"
    assert {found["settings"]["sampled with"] for found in (tokens, words)} == {sampled_with}
    assert (words["num_tasks"], words["samples_per_task"], words["settings"]["asked in"]) == (
        3,
        3,
        "words",
    )
    assert words["tokens"]["mean"] > 1
    # Nobody listens there any more.
    assert main([*SMALL, f"checkpoint={url}"]) == 2
    assert "expected an OpenAI-compatible server, found none" in capsys.readouterr().err


def test_server_without_token_support_gets_text_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(asked, "RETRIES_S", (0.0,))
    status = {"/v1/completions": 500, "/v1/chat/completions": 200}
    said = {"message": {"content": "It is \\boxed{5}."}, "finish_reason": "stop"}

    def answer(path: str, body: dict[str, Any]) -> Response:
        if path == "/v1/models":
            return 200, {"data": [{"id": "other"}]}
        found = {"choices": [said], "usage": {"completion_tokens": 5}}
        return status[path], found if status[path] == 200 else {"error": {"message": "no"}}

    with scripted_server.serving(answer) as server:
        found = evaluate(tmp_path / "words", f"checkpoint={server.url}")
        assert (found["num_tasks"], found["settings"]["asked in"]) == (6, "words")
        for path, wrong, reported in (
            ("/v1/chat/completions", 500, "500 Internal Server Error"),
            ("/v1/chat/completions", 404, "404 Not Found"),
            (
                "/v1/completions",
                401,
                "refused the request: 401 Unauthorized: no; set OPENAI_API_KEY",
            ),
        ):
            status[path] = wrong
            assert main([*SMALL, f"checkpoint={server.url}"]) == 2
            printed = capsys.readouterr().err
            assert (
                printed.startswith(f"areal_jax: checkpoint={server.url}: ") and reported in printed
            ), printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--exp=aime", "checkpoint=./missing"],
            "checkpoint=./missing: expected 'embedded', 'embedded_vision', an existing folder",
        ),
        (["--exp=aime", "checkpoint=./empty"], "has no config.json; or a run folder"),
        (["--exp=aime", "checkpoint=./run"], "this run has no checkpoint yet"),
        (["--exp=aime", "checkpoint=./run/checkpoints/newest"], "with a number, found 'newest'"),
        (
            ["--exp=aime", "checkpoint=./run/checkpoints/5"],
            "no checkpoint of version 5; found none",
        ),
        (["--exp=aime", "data=aime26"], "a benchmark (aime24, aime25"),
        (["--exp=aime", "data=./other.jsonl"], "found fields riddle"),
        (["--exp=aime", "data=./empty.jsonl"], "no rows"),
        (["--exp=aime", "engine.max_new_tokens=1000000"], "engine.max_new_tokens"),
        (["--exp=aime", "placement.rollout_devices=99"], "placement.rollout_devices=99"),
        (["--exp=aime", "evaluation.sample_per_task=3"], "evaluation.samples_per_task"),
        (["data=aime24"], "--exp=NAME"),
        (["--exp=aime", "--seed=3"], "without dashes"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run" / CHECKPOINTS).mkdir()
    write_config(load_experiment("aime"), tmp_path / "run" / "config.json")
    (tmp_path / "other.jsonl").write_text('{"riddle": "?"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("areal_jax: ")
    assert said in printed.err
    assert not (tmp_path / "evaluations").exists() or not list(
        tmp_path.glob("evaluations/*/samples.jsonl")
    )


@pytest.mark.slow
def test_raw_rewards_are_evaluated_by_their_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text("def reward(task, answer):\n    return len(answer) - 50.0\n")
    own = f"rewards.function={tmp_path / 'own.py'}:reward"
    found = evaluate(tmp_path / "raw", own, "rewards.scale=raw")
    rows = [
        json.loads(line) for line in (tmp_path / "raw" / "samples.jsonl").read_text().splitlines()
    ]
    means = [sum(answer["reward"] for answer in row["answers"]) / 3 for row in rows]
    assert found["mean_reward"] == pytest.approx(sum(means) / 6)
    assert found["mean_reward_standard_error"] > 0
    assert found["pass_at"] == {}
    assert "mean reward (standard error)" in capsys.readouterr().out


def test_an_unwritable_folder_is_refused_by_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--folder=/etc/passwd"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("areal_jax: --folder=/etc/passwd: cannot be written to (")


def commands(text: str) -> list[list[str]]:
    """Arguments of every `areal_jax.evaluate` command in a text; a backslash continues a line."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [
        shlex.split(line, comments=True)
        for line in re.findall(r"^ .*\bareal-evaluate (.*)", joined, re.MULTILINE)
    ]


def test_the_commands_in_readme_and_experiments_are_accepted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    docstrings = [
        ast.get_docstring(ast.parse(find_experiment(name).read_text())) or ""
        for name in experiment_names()
    ]
    found = [
        arguments
        for text in (*docstrings, (ROOT / "docs" / "evaluation.md").read_text())
        for arguments in commands(text)
    ]
    assert len(found) >= 4
    for arguments in found:
        assert main([*arguments, "--help"]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_embedded_policy_answers_are_readable(embedded: Path) -> None:
    tokenizer = HFTokenizer.from_folder(EMBEDDED)
    assert all(
        "\\boxed" in text and tokenizer.encode(text).size
        for of_task in texts(embedded).values()
        for text in of_task
    )
