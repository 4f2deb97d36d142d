"""Stored results: a line of results/NAME.jsonl per run of benchmark NAME, and results/NAME.png."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import jax

from areal_jax.metrics.description import environment

FOLDER = Path(__file__).parent / "results"


def append(name: str, row: Mapping[str, object]) -> None:
    """Append a row to results/NAME.jsonl and print it.

    The row also has the command, commit, versions and machine.

    Raises:
        ValueError: the row has a key of these.
    """
    device = jax.devices()[0]
    cores = f"{len(os.sched_getaffinity(0))} CPU threads"
    devices = (
        cores
        if device.platform == "cpu"
        else f"{jax.device_count()} x {device.device_kind}, {cores}"
    )
    ran = {
        "benchmark": name,
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(devices),
    }
    if taken := ran.keys() & row.keys():
        raise ValueError(f"expected other keys than {', '.join(sorted(ran))}, found {taken}")
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps({**ran, **row}) + "\n")
    print(json.dumps({**ran, **row}, indent=1))
