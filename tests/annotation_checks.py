"""Checks of annotations at run time, at less cost than those of jaxtyping's own decorator."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any, cast

from beartype import beartype
from jaxtyping import jaxtyped


def check_annotations(checked: Any) -> Any:
    """Check the types and shapes of a function's arguments and result, or of a dataclass's fields.

    jaxtyping's decorator binds the arguments of every call to the signature and checks them twice,
    before the call and with the result: a sixth of the processor time of tests that trace.
    """
    if inspect.isclass(checked):
        initialize: Any = checked.__init__
        if dataclasses.is_dataclass(checked) and not hasattr(initialize, "__wrapped__"):
            cast(Any, checked).__init__ = check_annotations(initialize)
        return checked
    if not checked.__annotations__:
        return checked
    call = _with_checks(checked)

    @functools.wraps(checked)
    def in_scope(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        with _scope():
            return call(*args, **kwargs)

    return in_scope


@functools.cache
def _scope() -> Any:
    """Return the context in which an axis letter means one size; making it imports jax."""
    return jaxtyped("context")


def _with_checks(function: FunctionType) -> Callable[..., Any]:
    annotations = function.__annotations__
    function.__annotations__ = {
        name: _evaluate(each, function.__globals__) for name, each in annotations.items()
    }
    try:
        return beartype(function)
    finally:
        function.__annotations__ = annotations


def _evaluate(annotation: Any, names: dict[str, Any]) -> Any:
    """Return what an annotation stands for; `Any` where only type checkers can read it."""
    holder = SimpleNamespace(__annotations__={"value": annotation})
    try:
        return typing.get_type_hints(holder, names, include_extras=True)["value"]
    except (NameError, TypeError):
        return Any
