"""Files of the Hugging Face hub, or of its cache on this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""owner/name"""


def fetch(name: str, kind: Literal["model", "dataset"], patterns: Sequence[str]) -> Path:
    """A folder with the repository's files that match `patterns`; downloads what the cache lacks.

    FileNotFoundError gives the command that would fetch them where the hub cannot be reached or
    knows no such name."""
    try:
        return Path(snapshot_download(name, repo_type=kind, allow_patterns=list(patterns)))
    except (OSError, HfHubHTTPError) as error:
        repo_type = " --repo-type dataset" if kind == "dataset" else ""
        reason = str(error).partition("\n")[0]
        raise FileNotFoundError(
            f"{kind} {name} is neither in the hub's cache here nor could it be downloaded "
            f"({reason}). "
            f"On a machine with network run `hf download{repo_type} {name}`, copy its cache or "
            "give a local path instead"
        ) from error
