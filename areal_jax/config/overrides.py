"""Flat, typed settings: list a tree of chz records, override it as `a.b=c`, write and read JSON.

A setting is one leaf of the tree under its dotted key, or one choice among classes (`tasks=Files`).
No setting is known by name here.
"""

from __future__ import annotations

import difflib
import types
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import chz
from chz.util import MISSING_TYPE

from areal_jax.bounds import Bound
from areal_jax.config.aliases import ALIASES
from areal_jax.errors import ConfigError
from areal_jax.python_objects import PythonObject

T = TypeVar("T")
JSON = bool | int | float | str | None | list["JSON"]


class Required:
    """Value of a setting without default that is not given."""


@dataclass(frozen=True)
class Setting:
    """One leaf of the tree, or one choice among classes."""

    key: str
    kind: Any
    """The field's annotation; for a choice, the class whose subclasses may be chosen, or an
    optional class."""
    value: Any
    """A scalar, a tuple of scalars, the chosen class (None for an optional record that is left
    out), or `Required`."""
    doc: str
    bounds: tuple[Bound, ...] = ()

    @property
    def choices(self) -> tuple[type, ...]:
        """The classes to choose among; empty for a plain value."""
        return choices_of(self.kind)

    def text(self) -> str:
        """The value as typed after `key=`."""
        return as_text(self.value)


Settings = dict[str, Setting]


def subclasses(kind: type) -> Iterator[type]:
    """Yield all chz subclasses of `kind` that can be chosen, in order of definition; no ABCs."""
    for below in kind.__subclasses__():
        if chz.is_chz(below):
            if ABC not in below.__bases__:
                yield below
            yield from subclasses(below)


def choices_of(kind: Any) -> tuple[type, ...]:
    """List the classes whose records a field of this kind may hold.

    These are the subclasses of a class, or an optional class with its subclasses.
    """
    if _may_be_none(kind):
        return tuple(
            choice
            for arg in get_args(kind)
            if chz.is_chz(arg)
            for choice in (arg, *subclasses(arg))
        )
    return tuple(subclasses(kind)) if chz.is_chz(kind) else ()


def _may_be_none(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType) and types.NoneType in get_args(kind)


def settings(config: object, prefix: str = "") -> Settings:
    """List all settings of a record, or of a class with its defaults, by dotted key."""
    listed: Settings = {}
    for name, field in chz.chz_fields(config).items():
        key, kind = prefix + name, field.final_type
        value = getattr(config, name) if not isinstance(config, type) else _default(field)
        is_choice = bool(choices_of(kind))
        if is_choice or not chz.is_chz(value):
            chosen = type(value) if is_choice and chz.is_chz(value) else value
            bounds = tuple(check for check in field._validator if isinstance(check, Bound))
            listed[key] = Setting(key, kind, chosen, field._doc, bounds)
        if chz.is_chz(value):
            listed |= settings(value, key + ".")
    return listed


def reachable(listed: Settings, choice: str = "") -> Iterator[tuple[Setting, str]]:
    """Yield every setting that exists under some choice among classes, with these choices.

    The choices are overrides; they are empty for settings that are listed.
    """
    yield from ((setting, choice) for setting in listed.values())
    for setting in listed.values():
        for each in setting.choices:
            if each is not setting.value:
                inside = settings(each, setting.key + ".")
                yield from reachable(inside, f"{choice} {setting.key}={each.__name__}".strip())


def groups(config: object, prefix: str = "") -> dict[str, str]:
    """List the docs of all records inside a record, by dotted key."""
    named: dict[str, str] = {}
    for name, field in chz.chz_fields(config).items():
        value = getattr(config, name) if not isinstance(config, type) else _default(field)
        if chz.is_chz(value):
            named |= {prefix + name: field._doc} | groups(value, f"{prefix}{name}.")
    return named


def _default(field: Any) -> Any:
    if isinstance(field._default_factory, type | types.FunctionType):
        return field._default_factory()
    return Required if isinstance(field._default, MISSING_TYPE) else field._default


def assign(given: Mapping[str, Any], to: Settings, read: Callable[[Any, Any], Any]) -> Settings:
    """Apply given values to settings.

    A newly chosen class brings its defaults, and removes the settings of the class that it
    replaces. A setting inside a record that was left out brings the record.

    Args:
        given: values by dotted key.
        to: settings to change.
        read: converts (given value, kind) to a value of that kind, or raises ValueError.

    Raises:
        ConfigError: a key is unknown, or a value is of another kind.
    """
    changed = dict(to)
    given = _implied(given, to) | dict(given)
    # Choices first, outermost first: they determine which other keys exist.
    for key in sorted(given, key=lambda key: key.count(".")):
        if key in changed and (choices := changed[key].choices):
            named = {as_text(choice): choice for choice in (changed[key].value, *choices)}
            named |= {"none": None} if _may_be_none(changed[key].kind) else {}
            wanted = as_text(given[key])
            alike = [name for name in named if name.lower() == wanted.lower()]
            if wanted not in named and len(alike) != 1:
                raise ConfigError(_mismatch(changed[key], given[key]))
            # A class that is given itself may have the name of another, such as an earlier
            # definition of a notebook cell.
            is_class = isinstance(given[key], type) and given[key] in choices
            chosen = given[key] if is_class else named[wanted if wanted in named else alike[0]]
            if chosen is not changed[key].value:
                changed = {
                    other: setting
                    for other, setting in changed.items()
                    if not other.startswith(key + ".")
                }
                changed |= {key: replace(changed[key], value=chosen)} | (
                    settings(chosen, key + ".") if chosen else {}
                )
    for key, value in given.items():
        if key not in changed:
            raise ConfigError(_unknown(key, changed))
        if not changed[key].choices:
            try:
                changed[key] = replace(changed[key], value=read(value, changed[key].kind))
            except ValueError:
                raise ConfigError(_mismatch(changed[key], value)) from None
    return changed


def _implied(given: Iterable[str], to: Settings) -> dict[str, str]:
    """Choices of left-out records inside which a setting is given."""
    off = {
        key: setting.choices
        for key, setting in to.items()
        if setting.choices and setting.value is None
    }
    return {
        key: choices[0].__name__
        for key, choices in off.items()
        if any(other.startswith(key + ".") for other in given)
    }


def build(cls: type[T], from_settings: Settings) -> T:
    """Build the record that settings describe.

    Raises:
        ConfigError: a required setting is missing, or a value is of another kind or out of bounds.
    """
    for setting in from_settings.values():
        if setting.value is Required:
            raise ConfigError(
                f"{setting.key} is required: expected {kind_name(setting.kind)} ({setting.doc})"
            )
        if not setting.choices and not fits(setting.value, setting.kind):
            raise ConfigError(_mismatch(setting, setting.value))
    if problems := [
        f"{setting.key}={as_text(setting.value)}: expected {bound.expected} ({setting.doc})"
        for setting in from_settings.values()
        for bound in setting.bounds
        if bound.is_violated_by(setting.value)
    ]:
        raise ConfigError("\n".join(problems))
    return (
        chz.Blueprint(cls)
        .apply({key: setting.value for key, setting in from_settings.items()})
        .make()
    )


def parse_overrides(overrides: Iterable[str]) -> dict[str, str]:
    """Split each `a.b=c` into key and value; the last value of a key wins."""
    given: dict[str, str] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"{override!r} is not a setting: expected key=value, such as "
                "rollout.max_staleness=8"
            )
        given[key] = value
    return given


def from_text(text: str, kind: Any) -> Any:
    """Read a command-line value as `kind`.

    Raises:
        ValueError: it is of another kind.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if types.NoneType in args and text.lower() == "none":
            return None
        for arg in args:
            with suppress(ValueError):
                return from_text(text, arg)
        raise ValueError(text)
    if origin is tuple:
        return tuple(from_text(item.strip(), args[0]) for item in text.split(",") if item.strip())
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    value = kind(text) if kind in (int, float) else text
    if not fits(value, kind):
        raise ValueError(text)
    return value


def flattened(changes: Mapping[str, Any], of: Settings) -> dict[str, Any]:
    """Values by dotted key, with each record as its class, where it is a choice, and its
    settings.
    """
    flat: dict[str, Any] = {}
    for key, given in changes.items():
        value = _as_record(given, key, of)
        if chz.is_chz(value) and not isinstance(value, type):
            flat |= {key: type(value)} if key in of else {}
            flat |= {each.key: each.value for each in settings(value, key + ".").values()}
        else:
            flat[key] = value
    return flat


def _as_record(value: Any, key: str, of: Settings) -> Any:
    """What a choice among classes makes of an object that is no record and no name."""
    is_choice = key in of and of[key].choices and hasattr(of[key].kind, "from_object")
    if not is_choice or value is None or isinstance(value, str | type) or chz.is_chz(value):
        return value
    return of[key].kind.from_object(value)


def from_object(value: Any, kind: Any) -> Any:
    """Read a Python value as `kind`: text as on the command line, numbers of numpy as numbers.

    Raises:
        ValueError: it is of another kind.
    """
    if callable(value) and not isinstance(value, str):
        value = PythonObject(value)
    if isinstance(value, str):
        return value if isinstance(value, PythonObject) else from_text(value, kind)
    is_scalar = getattr(value, "shape", None) == () and hasattr(value, "item")
    return from_json(value.item() if is_scalar else value, kind)


def from_json(value: JSON | tuple[Any, ...], kind: Any) -> Any:
    """Read a JSON value as `kind`.

    Raises:
        ValueError: it is of another kind.
    """
    read = tuple(value) if isinstance(value, list) else value
    if not fits(read, kind):
        raise ValueError(str(value))
    return read


def to_json(config: object) -> dict[str, JSON]:
    """Convert a record to settings by dotted key; a choice becomes the name of its class."""
    return {key: _jsonable(setting.value) for key, setting in settings(config).items()}


def _jsonable(value: Any) -> JSON:
    if isinstance(value, tuple):
        return list(value)
    return value.__name__ if isinstance(value, type) else value


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value is of the kind; an int is a float, a bool or NaN is not."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is Literal:
        return isinstance(value, str) and value in args
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(item, args[0]) for item in value)
    if kind is float:
        return type(value) in (int, float) and isfinite(value)
    return isinstance(value, str) if kind is str else type(value) is kind


def as_text(value: Any) -> str:
    """Format a value as typed on the command line."""
    if value is Required:
        return "(required)"
    if isinstance(value, tuple):
        return ",".join(as_text(item) for item in value)
    if isinstance(value, type):
        return value.__name__
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def kind_name(kind: Any) -> str:
    """Format a kind as text: `int or none`, `one of train, heldout`."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(kind_name(arg) for arg in args)
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if origin is tuple:
        return f"comma-separated {kind_name(args[0])}"
    if chz.is_chz(kind) and any(subclasses(kind)):
        return f"one of {', '.join(choice.__name__ for choice in subclasses(kind))}"
    return "none" if kind is types.NoneType else kind.__name__


def _mismatch(setting: Setting, found: object) -> str:
    return (
        f"{setting.key}={as_text(found)}: expected {kind_name(setting.kind)}, found {found!r} "
        f"({setting.doc})"
    )


def _unknown(key: str, known: Settings) -> str:
    """Describe an unknown key by the settings inside it, its class, or the closest names."""
    if inside := [other for other in known if other.startswith(key + ".")]:
        return f"{key} is a group of settings; set one of {', '.join(inside)}"
    parent, _, name = key.rpartition(".")
    if parent in known:
        having = [
            choice.__name__ for choice in known[parent].choices if name in chz.chz_fields(choice)
        ]
        if having:
            given = " or ".join(f"{parent}={choice}" for choice in having)
            return f"{key} is not a setting of {parent}={known[parent].text()}; set {given}"
    close = similar(key, known)
    hint = f"did you mean {' or '.join(close)}?" if close else "--help=WORD searches all settings"
    return f"unknown setting {key}; {hint}"


def similar(key: str, known: Settings) -> list[str]:
    """List keys that an unknown key may mean: by another trainer's name, else the closest names."""
    name = key.rpartition(".")[2]
    exist = {setting.key for setting, _ in reachable(known)}
    by_alias = [alias for alias in ALIASES.get(name.lower(), ()) if alias in exist]
    by_name = {other.rpartition(".")[2]: other for other in known}
    return (
        by_alias
        or difflib.get_close_matches(key, known, n=3)
        or [by_name[match] for match in difflib.get_close_matches(name, by_name, n=3)]
    )
