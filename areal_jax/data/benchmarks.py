"""Resolve `data=`: a benchmark by name, a file, a folder, or a data set of the hub.

The columns of the rows decide their format (`data/sources.py`, `data/code_tasks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from areal_jax.data.config import Files, Hub
from areal_jax.data.hub import NAME
from areal_jax.data.sources import SUFFIXES
from areal_jax.storage import fetch_objects

BENCHMARKS: Mapping[str, Hub] = {
    "aime24": Hub(name="HuggingFaceH4/aime_2024", split="train"),
    "aime25": Hub(name="math-ai/aime25", split="test"),
    "amc23": Hub(name="math-ai/amc23", split="test"),
    "math500": Hub(name="HuggingFaceH4/MATH-500", split="test"),
    "gsm8k": Hub(name="openai/gsm8k/main", split="test"),
    "humaneval": Hub(name="openai/openai_humaneval/openai_humaneval", split="test"),
    "mbpp": Hub(name="google-research-datasets/mbpp/full", split="test"),
    "livecodebench": Hub(name="livecodebench/code_generation_lite", split="test"),
}
"""Hub name and split of the benchmarks that papers report."""


def find_benchmark(data: str) -> Files | Hub:
    """Find the source of the tasks that `data=` names.

    Args:
        data: a file, a folder with test files or with a single file, a benchmark, or a data set of
            the hub.

    Raises:
        FileNotFoundError: nothing has this name.
        ValueError: the folder has several files and none of them is a test file.
    """
    path = fetch_objects(data)
    if path.is_dir():
        return Files(path=data, split=_split(path))
    if path.is_file():
        return Files(path=data)
    if data in BENCHMARKS:
        return BENCHMARKS[data]
    if (
        NAME.fullmatch("/".join(data.split("/")[:2]))
        and not data.startswith(".")
        and path.suffix not in SUFFIXES
    ):
        return Hub(name=data, split="test")
    raise FileNotFoundError(
        f"data={data}: expected an existing file or folder, a benchmark ({', '.join(BENCHMARKS)}), "
        f"or a data set of the hub such as openai/gsm8k/main (working directory: {Path.cwd()})"
    )


def _split(folder: Path) -> str:
    """Prefix of the file names to read: `test` if a file has it, else the name of the only file."""
    names = sorted({file.name for file in folder.rglob("*") if file.suffix in SUFFIXES})
    if any(name.startswith("test") for name in names):
        return "test"
    if len(names) == 1:
        return names[0]
    raise ValueError(
        f"data={folder}: expected test*.jsonl, .json or .parquet, or a single such file; found "
        f"{names or 'none'}"
    )
