"""areal-serve: settings, errors, and the life of the process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from areal_jax.cli.serve import main, read_config


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["prot=1"], "unknown setting prot; did you mean port"),
        (["port=x"], "port=x: expected int"),
        (["port=70000"], "expected 0 to 65535"),
        (["engine.num_slots=0"], "engine.num_slots=0: expected a number above 0"),
        (["limits.max_requests=-1"], "expected a number above 0"),
        (["api_key="], "api_key= is empty"),
        (["model"], "'model' is not a setting"),
        (
            ["model=/nowhere", "simulated_devices=8"],
            "model=/nowhere: expected 'embedded', 'embedded_vision', an existing folder",
        ),
        (["engine.max_new_tokens=900", "simulated_devices=8"], "longer than the 1024 positions"),
    ],
)
def test_invalid_settings_are_refused_by_name(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    assert main(given) == 2
    assert words in capsys.readouterr().err


def test_settings_are_given_as_they_are_for_training():
    config = read_config(
        ["model=embedded", "engine.num_slots=4", "port=0", "limits.max_requests=7"]
    )
    assert (config.engine.num_slots, config.port, config.limits.max_requests) == (4, 0, 7)
    assert config.host == "127.0.0.1"


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]):
    assert main(["--help=all"]) == 0
    listed = capsys.readouterr().out
    assert (
        "engine.num_slots=16" in listed
        and "limits.max_body_bytes=" in listed
        and "api_key=none" in listed
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_signal_during_loading_ends_the_server(
    number: signal.Signals, tmp_path: Path, of_a_command: dict[str, str]
):
    # A file of the policy that never ends: loading it takes for ever, in a thread that receives
    # nothing.
    endless = tmp_path / "config.json"
    os.mkfifo(endless)
    process = subprocess.Popen(
        [sys.executable, "-m", "areal_jax.serve", f"model={tmp_path}", "port=0"], env=of_a_command
    )
    try:
        deadline_s, pipe = time.monotonic() + 60, None
        while pipe is None:
            try:
                pipe = os.open(endless, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                # Nobody reads yet.
                assert process.poll() is None and time.monotonic() < deadline_s
                time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(10) == 128 + number
        os.close(pipe)
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.slow
def test_server_answers_until_a_signal(of_a_command: dict[str, str], tmp_path: Path):
    given = [
        "port=0",
        "engine.num_slots=1",
        "engine.max_prompt_tokens=16",
        "engine.max_new_tokens=16",
    ]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "areal_jax.serve", *given],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=of_a_command,
        )
    try:
        assert process.stdout is not None
        url = re.search(r"http://\S+", process.stdout.readline())
        key = process.stdout.readline().removeprefix("bearer token: ").strip()
        assert url is not None and len(key) > 20
        body = json.dumps({"model": "embedded", "prompt": "1+1=", "max_tokens": 3}).encode()
        request = urllib.request.Request(
            f"{url[0]}/completions", body, {"Authorization": f"Bearer {key}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] >= 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert re.search(r"compiling 1 of \d+: init\n", (tmp_path / "log").read_text())
    finally:
        process.kill()
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()
