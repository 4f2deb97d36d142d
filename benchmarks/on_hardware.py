"""First ten minutes on an accelerator: what works there and how fast, in one JSON file.

    benchmarks/on_hardware.sh [OUT.json]          # default: on_hardware.json

Runs on whatever devices jax finds, each stage in a process of its own with a time limit:

- `train`: six steps of `areal-train --exp=aime`, with pass@1 before and after;
- `kernel_parity`: every kernel of these devices against the plain formula;
- `decode`: tokens/s relative to the memory roofline, and the stall of a weight swap;
- `train_mfu`: tokens/s and MFU of a decoupled-PPO update.

A CPU gets tiny shapes. A stage that fails or exceeds its limit does not end the others: its exit
status and the end of its output are in the file, and the script exits with 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import FOLDER
from runs import pass_at_1, read, steps

from areal_jax.metrics import jsonl

TAIL_CHARACTERS = 4000


def run(command: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run a stage; return its exit status (None: the limit), seconds and the end of its output."""
    started_s = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        status, output = None, error.stdout or b""
    return {
        "command": " ".join(["python", *command]),
        "status": status,
        "seconds": time.perf_counter() - started_s,
        "output": output.decode(errors="replace")[-TAIL_CHARACTERS:],
    }


def run_benchmark(name: str, arguments: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run a benchmark script; its result has the rows that it appended."""
    stored = FOLDER / f"{name}.jsonl"
    num_before = len(list(jsonl.read(stored))) if stored.exists() else 0
    script = Path(__file__).with_name(f"{name}.py")
    done = run([str(script.relative_to(Path.cwd())), *arguments], limit_s)
    rows = list(jsonl.read(stored))[num_before:] if stored.exists() else []
    return {**done, "rows": rows}


def train(limit_s: float) -> dict[str, Any]:
    """Train a few steps of the embedded policy."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        settings = ("num_steps=6", "evaluation.every_steps=6", "checkpoint.export_hf=false")
        done = run(
            ["-m", "areal_jax.train", "--exp=aime", f"--run-folder={folder}", *settings], limit_s
        )
        done["command"] = done["command"].replace(str(folder), "RUN")
        rows = read(folder) if (folder / "metrics.jsonl").exists() else []
    return {**done, "pass_at_1": pass_at_1(rows), "rows": steps(rows)}


def platform() -> str:
    """Return the platform of the devices, by a process that gives them back."""
    found = run(["-c", "import jax; print('\\n' + jax.devices()[0].platform)"], 120)
    if found["status"] != 0:
        sys.exit(f"jax finds no devices:\n{found['output']}")
    return found["output"].split()[-1]


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "on_hardware.json")
    on_cpu = platform() == "cpu"
    decode = (
        ("--shape=tiny", "--slots=16", "--mean-tokens=160", "--new-tokens=64")
        if on_cpu
        else ("--shape=qwen2.5-1.5b", "--slots=64", "--mean-tokens=1024", "--new-tokens=128")
    )
    mfu = ("--tiny",) if on_cpu else ("--micro-batches=2", "--updates=3", "--row-tokens=8192")
    found: dict[str, dict[str, Any]] = {}
    for name, stage in {
        "train": lambda: train(180),
        "kernel_parity": lambda: run_benchmark("kernel_parity", (), 120),
        "decode": lambda: run_benchmark("decode", (*decode, "--no-compile-times"), 150),
        "train_mfu": lambda: run_benchmark("train_mfu", mfu, 150),
    }.items():
        found[name] = stage()
        print(f"{name}: status {found[name]['status']}, {found[name]['seconds']:.0f} s", flush=True)
        out.write_text(json.dumps(found, indent=1))
    failed = [name for name, stage in found.items() if stage["status"] != 0]
    print(f"wrote {out}")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
