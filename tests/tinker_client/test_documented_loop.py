"""The loop of docs/tinker.md learns, with the embedded policy and the server as its page starts it."""

# pyright: reportMissingImports=false
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "tinker.md"


def test_the_documented_loop_learns(tmp_path: Path, of_a_command: dict[str, str]) -> None:
    (loop,) = re.findall(r"```console\n(import numpy.*?)```", PAGE.read_text(), re.S)
    given = ["port=0", f"run_folder={tmp_path}", "engine.num_slots=64", "devices=1"]
    server = subprocess.Popen(
        [sys.executable, "-m", "areal_jax.tinker", *given],
        stdout=subprocess.PIPE,
        text=True,
        env=of_a_command | {"JAX_PLATFORMS": "cpu"},
    )
    assert server.stdout is not None
    try:
        printed = [server.stdout.readline() for _ in range(3)]
        variables = dict(line.strip().split("=", 1) for line in printed[1:])
        assert set(variables) == {"TINKER_BASE_URL", "TINKER_API_KEY"}
        done = subprocess.run(
            # The client's threads abort some interpreters while they end.
            [sys.executable, "-c", f"{loop}\nimport os, sys\nsys.stdout.flush()\nos._exit(0)"],
            env=of_a_command | variables | {"TINKER_TELEMETRY": "0"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    assert done.returncode == 0, done.stderr[-3000:]
    rewards = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(rewards) == 15
    # Of 64 samples a step: rarely at first, nearly always at the end.
    assert rewards[0] <= 0.2 and rewards[-1] >= 0.9, rewards
