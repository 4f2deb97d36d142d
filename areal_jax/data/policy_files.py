"""Locate the files of a policy: config.json, tokenizer.json and model.safetensors."""

from __future__ import annotations

from pathlib import Path

from areal_jax.data.hub import NAME, fetch
from areal_jax.storage import fetch_objects

EMBEDDED = Path(__file__).parent.parent / "models" / "embedded"
"""Folder of the tiny policy inside the package."""

EMBEDDED_VISION = EMBEDDED.with_name("embedded_vision")
"""Folder of the tiny policy that reads images."""

EMBEDDED_POLICIES = {folder.name: folder for folder in (EMBEDDED, EMBEDDED_VISION)}
"""Folders of the policies inside the package, by the name that settings have for them."""


def resolve_policy_folder(
    path: str, setting: str = "policy.path", *, has_weights: bool = True
) -> Path:
    """Find the folder of a policy; download it if necessary.

    Args:
        path: 'embedded', 'embedded_vision', a Hugging Face folder, also gs:// or s3://, or a name
            on the hub.
        setting: name of the setting that holds `path`, for messages.
        has_weights: whether a download includes the weights.

    Raises:
        FileNotFoundError: there is no such folder, or the download fails; the message gives the
            command that fetches it.
    """
    if path in EMBEDDED_POLICIES:
        return _with_config(EMBEDDED_POLICIES[path], path, setting)
    folder = fetch_objects(path)
    if folder.exists():
        return _with_config(folder, path, setting)
    if NAME.fullmatch(path) and not path.startswith("."):
        weights = ("*.safetensors",) if has_weights else ()
        return _with_config(fetch(path, "model", ("*.json", *weights, "*.jinja")), path, setting)
    raise FileNotFoundError(
        f"{setting}={path}: expected {', '.join(map(repr, EMBEDDED_POLICIES))}, an existing "
        "folder, or a hub name such as deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    )


def _with_config(folder: Path, path: str, setting: str) -> Path:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{setting}={path}: expected a Hugging Face folder; {folder} has no config.json"
        )
    return folder
