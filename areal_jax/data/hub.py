"""Files of the Hugging Face hub, downloaded or from its local cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""owner/name"""


def fetch(name: str, kind: Literal["model", "dataset"], patterns: Sequence[str]) -> Path:
    """Download the files of a repository that match `patterns`, unless they are cached.

    Returns:
        The local folder of the repository.

    Raises:
        FileNotFoundError: the hub is unreachable or has no such repository; the message gives the
            command that fetches it.
    """
    # Imported where it is used: most runs read local files.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name, repo_type=kind, allow_patterns=list(patterns)))
    except (OSError, HfHubHTTPError) as error:
        repo_type = " --repo-type dataset" if kind == "dataset" else ""
        reason = str(error).partition("\n")[0]
        raise FileNotFoundError(
            f"{kind} {name}: not in the local hub cache, and the download failed ({reason}). "
            f"On a machine with network run `hf download{repo_type} {name}` and copy its cache, "
            "or set a local path instead"
        ) from error
