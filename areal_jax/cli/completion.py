"""Completion of overrides in the shell."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from areal_jax.config.overrides import Settings, reachable


def completions(prefix: str, listed: Settings, others: Mapping[str, Sequence[str]]) -> list[str]:
    """Overrides that begin with a prefix: keys up to `key=`, then values.

    Args:
        prefix: what is typed so far.
        listed: settings to complete.
        others: values of the keys that are no settings.
    """
    key, equals, value = prefix.partition("=")
    every = {setting.key: setting for setting, _ in reachable(listed)} | listed
    if not equals:
        return [f"{name}=" for name in (*every, *others) if name.startswith(prefix)]
    if key in others:
        known = others[key]
    elif key in every:
        choices = [choice.__name__ for choice in every[key].choices]
        known = [*choices, *_values(every[key].kind)]
    else:
        return []
    # Of a list, the last item is completed.
    before, comma, _ = value.rpartition(",")
    return [
        f"{key}={before}{comma}{each}"
        for each in known
        if f"{before}{comma}{each}".startswith(value)
    ]


def _values(kind: Any) -> Iterator[str]:
    """The values of a kind that has few."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        for arg in args:
            yield from _values(arg)
    elif origin is tuple:
        yield from _values(args[0])
    elif origin is Literal:
        yield from args
    elif kind is bool:
        yield from ("true", "false")
    elif kind is types.NoneType:
        yield "none"
