"""Policies named on the command line: a run, a Hugging Face folder or hub name, or an adapter."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.checkpoint.folders import newest_whole
from areal_jax.config.load import CONFIG_FILE, holds_run, read_config
from areal_jax.config.overrides import settings
from areal_jax.data.policy_files import resolve_policy_folder
from areal_jax.errors import ConfigError
from areal_jax.models.config import ADAPTER_CONFIG
from areal_jax.storage import fetch_objects, is_url, local_path


@dataclass(frozen=True)
class RunCheckpoint:
    """A checkpoint of a run."""

    folder: Path
    """Run folder."""
    version: int | None
    """Version of the checkpoint; None for the newest."""
    seed: int
    """Seed of the run, for weights that no file has."""


class NamedPolicy(NamedTuple):
    settings: dict[str, str]
    """Settings of the `PolicyConfig`; without `path` for an adapter, which may fit several
    policies."""
    checkpoint: RunCheckpoint | None = None


def named_policy(where: str, setting: str) -> NamedPolicy:
    """Find a policy by run folder, RUN/checkpoints/VERSION, PEFT folder or Hugging Face name.

    Args:
        where: folder, or name on the Hugging Face hub.
        setting: setting with the value `where`, for messages.

    Raises:
        ConfigError: there is none of these.
    """
    folder = _fetch(where)
    if (run := _run_of(folder, where, setting)) is not None:
        ran = read_config(run[0] / CONFIG_FILE)
        listed = settings(ran.policy).values()
        return NamedPolicy(
            {each.key: each.text() for each in listed}, RunCheckpoint(*run, seed=ran.seed)
        )
    if (folder / ADAPTER_CONFIG).is_file():
        return NamedPolicy({"lora": "none", "adapter": where})
    try:
        resolve_policy_folder(where, setting)
    except FileNotFoundError as error:
        raise ConfigError(f"{error}; or a run folder, or RUN/{CHECKPOINTS}/VERSION") from error
    return NamedPolicy({"path": where, "random_init": "false", "lora": "none", "adapter": "none"})


def _fetch(where: str) -> Path:
    """Path of a folder; of a run in object storage, the copy with the checkpoint that is named."""
    if not is_url(where):
        return local_path(where)
    match = re.fullmatch(rf"(.+)/{CHECKPOINTS}(?:/(\d+))?/?", where)
    run, number = match.groups() if match else (where, None)
    version = None if number is None else int(number)
    folder = fetch_objects(run, partial(newest_whole, version=version))
    return folder if number is None else folder / CHECKPOINTS / number


def _run_of(folder: Path, where: str, setting: str) -> tuple[Path, int | None] | None:
    """Return folder and version (None: the newest) of a run; None if there is no run."""
    if holds_run(folder):
        return folder, None
    if folder.name == CHECKPOINTS and holds_run(folder.parent):
        return folder.parent, None
    if folder.parent.name == CHECKPOINTS and holds_run(folder.parent.parent):
        if not folder.name.isdigit():
            raise ConfigError(
                f"{setting}={where}: expected RUN/{CHECKPOINTS}/VERSION with a number, found "
                f"{folder.name!r}"
            )
        return folder.parent.parent, int(folder.name)
    return None
