"""Where the files of a policy lie: config.json, tokenizer.json and model.safetensors."""

from __future__ import annotations

from pathlib import Path

from areal_jax.data.hub import NAME, fetch

EMBEDDED = Path(__file__).parent.parent / "models" / "embedded"
"""The tiny policy inside the package."""


def resolve_policy_folder(path: str, setting: str = "policy.path") -> Path:
    """The folder of the policy called `path`: 'embedded', a Hugging Face folder, or a name on the
    hub, which is downloaded.

    Args: setting: where `path` is from, for messages.
    FileNotFoundError says what was looked for, and the command that would fetch it."""
    if path == "embedded":
        return _with_config(EMBEDDED, path, setting)
    folder = Path(path).expanduser()
    if folder.exists():
        return _with_config(folder, path, setting)
    if NAME.fullmatch(path) and not path.startswith("."):
        return _with_config(
            fetch(path, "model", ("*.json", "*.safetensors", "*.jinja")), path, setting
        )
    raise FileNotFoundError(
        f"{setting}={path}: expected 'embedded', an existing folder, or a hub name such as "
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    )


def _with_config(folder: Path, path: str, setting: str) -> Path:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{setting}={path}: expected a Hugging Face folder, but {folder} has no config.json"
        )
    return folder
