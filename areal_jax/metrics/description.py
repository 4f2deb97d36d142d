"""run.json: settings and environment of a run, written at its start."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from areal_jax.metrics.files import write_atomically
from areal_jax.metrics.jsonl import encode

FILE = "run.json"


def write_description(
    run_folder: Path,
    headline: str,
    configuration: Mapping[str, object],
    devices: str,
    missing_rows: Mapping[str, list[int]] | None = None,
) -> None:
    """Write run.json.

    Args:
        run_folder: the run's folder; created if missing.
        headline: policy, data and devices, as printed at the start.
        configuration: settings by their name on the command line, such as
            `trainer.num_mini_batches`.
        devices: jax's devices, such as "8 x TPU v5e".
        missing_rows: by file, versions whose rows are known to be missing.
    """
    run_folder.mkdir(parents=True, exist_ok=True)
    description = {
        "headline": headline,
        "started_s": time.time(),
        "command": shlex.join(sys.orig_argv),
        "environment": environment(devices),
        "configuration": dict(configuration),
    }
    if missing_rows and any(missing_rows.values()):
        description["missing_rows"] = dict(missing_rows)
    write_atomically(run_folder / FILE, json.dumps(json.loads(encode(description)), indent=2))


def environment(devices: str) -> dict[str, str]:
    """Return commit (if the code is in a git repository), versions and machine."""
    return {
        "commit": _commit() or "none",
        **{
            name: _version(name)
            for name in ("areal-jax", "jax", "jaxlib", "flax", "optax", "numpy")
        },
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "devices": devices,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"


def _commit() -> str | None:
    """Return the commit of this code, marked if the code differs from it."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # git would find another repository
        return None
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--abbrev=40",
        "--dirty",
        "--exclude=*",
    ]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
