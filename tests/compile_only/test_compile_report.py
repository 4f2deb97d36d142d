"""`areal-train --compile-for`: the programs of a run, compiled for a TPU slice that is not there."""

from __future__ import annotations

import re
import subprocess
import sys

KV_TOKENS = 400_000_000
"""More than fits a slice."""


def test_compile_for_prints_programs_and_refuses_what_does_not_fit() -> None:
    command = ["--exp=aime", "--compile-for=v5e:2x2", "placement.rollout_devices=2"]
    done = subprocess.run(
        [sys.executable, "-m", "areal_jax.train", *command, f"engine.kv_tokens={KV_TOKENS}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    out = done.stdout
    assert done.returncode == 1, done.stderr
    # Training fits, and is bound by the data sheet.
    assert re.search(r"trainer accumulate +0:\d\d +0\.\d\d +0\.\d\d +14\.90", out)
    (mfu,) = re.findall(r"training: at most (\d+)% MFU \(compiled", out)
    assert 0 < int(mfu) < 100
    assert re.search(r"trainer accumulate +all-gather +fsdp", out)
    # The engine's caches do not, and the message names the setting.
    (line,) = (each for each in out.splitlines() if each.startswith("engine generate 0 0 does not"))
    assert "of 15.75G by XLA" in line
    assert "lower engine.num_slots, engine.max_new_tokens or engine.kv_tokens" in line
    assert "programs do not fit" in done.stderr
