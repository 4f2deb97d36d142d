"""Validation of request bodies, with errors in the form of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ValidationError,
    WrapValidator,
    with_config,
)
from pydantic_core import ErrorDetails, PydanticCustomError

_MAX_MESSAGE = 1000
"""Characters of an error message: it may quote the request."""


class APIError(Exception):
    """A refused request, with the message for the client."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        message = message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + "..."
        super().__init__(message)
        self.status, self.message, self.code, self.param = (
            status,
            message,
            code,
            param and param[:_MAX_MESSAGE],
        )

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's API writes it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


# Nested objects are dicts: instances of pydantic's models take sixteen times as long, under the
# interpreter's lock.
strict = with_config(ConfigDict(strict=True))


def expected(what: str) -> WrapValidator:
    """Give one error for a type with several forms, instead of one for each form."""

    def validate(value: Any, inner: Callable[[Any], Any]) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("form", "{what}", {"what": what}) from None

    return WrapValidator(validate)


def only(supported: Any) -> AfterValidator:
    """Restrict a field to its one supported value."""

    def validate(value: Any) -> Any:
        if value != supported:
            words = {"supported": json.dumps(supported), "value": json.dumps(value)[:200]}
            raise PydanticCustomError("unsupported", "{supported}, found {value}", words)
        return value

    return AfterValidator(validate)


_B = TypeVar("_B", bound=BaseModel)


def without_ignored(
    given: Mapping[str, Any], kind: type[BaseModel], ignored: Collection[str]
) -> dict[str, Any]:
    """Drop nulls, which mean that a field is not given, and fields without effect.

    Raises:
        APIError: the body has a field that is neither a field of `kind` nor ignored.
    """
    known = {field.alias or name for name, field in kind.model_fields.items()} | set(ignored)
    for name, value in given.items():
        # Only the first one: pydantic would report each, and a body may have many.
        if value is not None and name not in known:
            raise APIError(400, f"Unrecognized request argument supplied: {name}", param=name)
    return {name: each for name, each in given.items() if each is not None and name not in ignored}


def validated(kind: type[_B], given: Mapping[str, Any]) -> _B:
    """Return a body as its model.

    Raises:
        APIError: it does not fit.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refused(error.errors(include_url=False)[0]) from None


_ERRORS = {
    "missing": "you must provide {path}",
    "unsupported": "{path} is not supported: expected {expected}",
    "too_long": "expected {path} to have at most {max_length} items, found {found}",
    "too_short": "expected {path} to have at least {min_length} item, found {found}",
    "dict_type": "expected {path} to be an object, found {found}",
}
"""Messages by type of error, where not pydantic's own."""


def _refused(error: ErrorDetails) -> APIError:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in error["loc"])
    path = "".join(steps).removeprefix(".")
    template = _ERRORS.get(error["type"], "expected {path} to {expected}, found {found}")
    words = {
        "path": path,
        "expected": error["msg"].removeprefix("Input should "),
        "found": describe(error["input"]),
    }
    return APIError(400, template.format_map(error.get("ctx", {}) | words), param=path)


def describe(value: object) -> str:
    """Describe a value of a request in a few words."""
    match value:
        case dict():
            return "an object"
        case list():
            return f"a list of {len(value)}"
        case str():
            return json.dumps(value[:100], ensure_ascii=False)
        case _:
            return json.dumps(value)[:100]
