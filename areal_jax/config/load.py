"""Find, read, override, check and write experiments.

Example:
    experiment = load_experiment("aime", "rollout.max_staleness=8", "tasks=Files")
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import chz

from areal_jax import __version__
from areal_jax.config.checks import contradictions
from areal_jax.config.experiment import AnyExperiment, Experiment
from areal_jax.config.overrides import (
    Settings,
    assign,
    build,
    flattened,
    from_json,
    from_object,
    from_text,
    parse_overrides,
    settings,
    to_json,
)
from areal_jax.config.renamed import find_renamed
from areal_jax.errors import ConfigError
from areal_jax.metrics.files import write_atomically
from areal_jax.rl.config import GAE
from areal_jax.rl.presets import PRESETS
from areal_jax.trainer.config import Critic

CONFIG_FILE = "config.json"
"""File of a run folder with the resolved settings."""

_MODULE_PREFIX = "experiment "
"""What the module names of experiments begin with, before the path."""

_VERSION_KEY = "areal_jax.version"
_CLASS_KEY = "areal_jax.experiment"
_RUN_KEY = "areal_jax.run"


def load_experiment(name_or_path: str, *overrides: str) -> AnyExperiment:
    """Load experiments/NAME.py, or the Python file at a path, with `a.b=c` overrides.

    Raises:
        ConfigError: there is no such experiment, an override fits no setting, or settings
            contradict each other.
    """
    experiment = _experiment_in(find_experiment(name_or_path))
    return _resolved(type(experiment), settings(experiment), overrides)


def replace_settings(
    experiment: AnyExperiment, overrides: Sequence[str], changes: Mapping[str, Any]
) -> AnyExperiment:
    """Change settings of an experiment, by overrides and by Python values under dotted keys.

    Raises:
        ConfigError: as `load_experiment`.
    """
    return _resolved(type(experiment), settings(experiment), overrides, changes)


def source_of(experiment: AnyExperiment) -> str | None:
    """File of the experiment that defines classes which the settings name; None where all are the
    package's own.
    """
    for setting in settings(experiment).values():
        if isinstance(setting.value, type) and setting.value.__module__.startswith(_MODULE_PREFIX):
            return setting.value.__module__.removeprefix(_MODULE_PREFIX)
    return None


def read_config(path: Path, overrides: Sequence[str] = ()) -> AnyExperiment:
    """Read the experiment that a run wrote to its config.json, with overrides.

    A setting that the file lacks has its default.

    Raises:
        ConfigError: the file is not a run's config.json, is of release 0.1, or has a setting that
            this release does not know.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); expected the {CONFIG_FILE} of a run"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"{path}: expected the {CONFIG_FILE} of a run, found no text ({error})"
        ) from None
    return _read(text, str(path), overrides)


def read_settings(text: str, source: str | None) -> AnyExperiment:
    """Read the experiment that another process of this run wrote with `written_settings`.

    Args:
        source: name or file of the experiment, which may define classes that the settings name.

    Raises:
        ConfigError: as `read_config`.
    """
    if source is not None:
        load_experiment(source)
    return _read(text, "the settings of the run", ())


def written_settings(experiment: AnyExperiment) -> str:
    """Format all settings as text, flat and readable, in the form of config.json."""
    header = {_VERSION_KEY: __version__, _CLASS_KEY: type(experiment).__name__}
    return json.dumps(header | to_json(experiment), indent=2, allow_nan=False) + "\n"


def _read(text: str, path: str, overrides: Sequence[str]) -> AnyExperiment:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{path}: expected the {CONFIG_FILE} of a run, found no JSON ({error})"
        ) from None
    classes = {cls.__name__: cls for cls in get_args(AnyExperiment)}
    cls = classes.get(str(given.pop(_CLASS_KEY, ""))) if isinstance(given, dict) else None
    if cls is None:
        raise ConfigError(
            f"{path}: expected the {CONFIG_FILE} of a run, with {_CLASS_KEY} one of "
            f"{', '.join(classes)}"
        )
    given.pop(_RUN_KEY, None)
    version = given.pop(_VERSION_KEY, "an unknown version")
    if str(version).startswith("0.1."):
        raise ConfigError(
            f"{path}: written by areal_jax {version}, expected {__version__}, which has other "
            f"settings; read it with release {version}: pip install 'areal-jax=={version}'"
        )
    try:
        return _resolved(cls, assign(given, settings(cls), from_json), overrides)
    except ConfigError as error:
        raise ConfigError(
            f"{path} (written by areal_jax {version}, this is {__version__}): {error}"
        ) from None


def holds_run(folder: Path) -> bool:
    """Whether the config.json in a folder is a run's, not a policy's."""
    try:
        return _CLASS_KEY in json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def write_config(experiment: AnyExperiment, path: Path, run_id: str | None = None) -> None:
    """Write all settings, flat and readable; `--config=PATH` repeats the run.

    Args:
        run_id: identifies the run.
    """
    written = written_settings(experiment)
    if run_id is not None:
        written = json.dumps({_RUN_KEY: run_id} | json.loads(written), indent=2) + "\n"
    write_atomically(path, written)


def read_plainly(path: Path) -> tuple[str | None, Mapping[str, Any]]:
    """Read run id and settings of a config.json, unchecked; None and empty if there is none."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None, {}
    return given.get(_RUN_KEY), given


def experiment_names() -> list[str]:
    """List the names that `--exp` accepts."""
    return sorted(path.stem for path in _experiments_folder().glob("*.py"))


def find_experiment(name_or_path: str) -> Path:
    """Find the file of an experiment by name or path.

    Raises:
        ConfigError: there is none; the message lists the names.
    """
    if name_or_path.endswith(".py"):
        path = Path(name_or_path)
        hint = "give the path of an existing file, or a name"
    else:
        path = _experiments_folder() / f"{name_or_path}.py"
        hint = f"known names: {', '.join(experiment_names())}; or give the path of a .py file"
    if not path.is_file():
        raise ConfigError(f"no experiment {name_or_path!r}; {hint}")
    return path


def _experiments_folder() -> Path:
    """Return the folder experiments/: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "experiments"
    return installed if installed.is_dir() else package.parent / "experiments"


def _experiment_in(path: Path) -> AnyExperiment:
    module_name = f"{_MODULE_PREFIX}{path.resolve()}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    # chz looks the module up when it reads the annotations of classes that the file defines.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code; its trace starts in the user's file
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != spec.origin:
            trace = trace.tb_next
        reported = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        raise ConfigError(f"{path}: {type(error).__name__}: {error}\n{reported}") from error
    experiment = getattr(module, "experiment", None)
    if not isinstance(experiment, AnyExperiment):
        names = ", ".join(cls.__name__ for cls in get_args(AnyExperiment))
        raise ConfigError(
            f"{path}: expected `experiment` to be one of {names}, found {type(experiment).__name__}"
        )
    return experiment


def _resolved(
    cls: type[AnyExperiment],
    flat: Settings,
    overrides: Sequence[str],
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> AnyExperiment:
    given = parse_overrides(overrides)
    if renamed := list(find_renamed({**given, **changes})):
        raise ConfigError("\n".join(renamed))
    if name := given.pop("algorithm", None):
        flat = settings(_with_algorithm(build(cls, flat), name))
    flat = assign(given, flat, from_text)
    experiment = build(cls, assign(flattened(changes, flat), flat, from_object))
    if problems := list(contradictions(experiment)):
        raise ConfigError("\n".join(problems))
    return experiment


def _with_algorithm(experiment: AnyExperiment, name: str) -> Experiment:
    """Apply the settings of a preset to an experiment.

    Raises:
        ConfigError: there is no such preset; the message lists the names.
    """
    preset = PRESETS.get(name.lower())
    if preset is None:
        raise ConfigError(f"expected an algorithm of {', '.join(PRESETS)}, found {name!r}")
    if not isinstance(experiment, Experiment):
        raise ConfigError(
            f"algorithm={name} needs reinforcement learning, and {experiment.name} is fine-tuning"
        )
    trainer = chz.replace(
        experiment.trainer,
        loss=preset.loss,
        loss_mean=preset.loss_mean,
        advantages=preset.advantages,
        shaping=preset.shaping,
        positive_nll_coef=preset.positive_nll_coef,
        critic=experiment.trainer.critic if isinstance(preset.advantages, GAE) else Critic(),
        reference=preset.reference,
        optimizer=chz.replace(experiment.trainer.optimizer, ess_exponent=preset.ess_exponent),
    )
    rollout = chz.replace(
        experiment.rollout,
        success_rate_above=preset.success_rate_above,
        success_rate_below=preset.success_rate_below,
        min_sequence_ess=preset.min_sequence_ess,
    )
    return chz.replace(experiment, trainer=trainer, rollout=rollout)
