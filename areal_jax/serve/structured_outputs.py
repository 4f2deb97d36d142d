"""Formats of answers and choices of tools, as OpenAI's and vLLM's protocols write them, and the
grammars that they stand for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from pydantic_core import from_json
from typing_extensions import TypedDict

from areal_jax.data.grammars import choice_grammar, json_grammar, regex_grammar, text_grammar
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.data.tool_grammars import calls_grammar
from areal_jax.errors import InvalidRequest
from areal_jax.serve.validation import APIError, expected

_strict = with_config(ConfigDict(strict=True))


@_strict
class _JSONSchema(TypedDict):
    name: NotRequired[str | None]
    schema: NotRequired[dict[str, Any] | None]


@_strict
class _PlainFormat(TypedDict):
    type: Literal["text", "json_object"]


@_strict
class _SchemaFormat(TypedDict):
    type: Literal["json_schema"]
    json_schema: _JSONSchema


ResponseFormat = Annotated[_PlainFormat | _SchemaFormat, Field(discriminator="type")]


@_strict
class _Named(TypedDict):
    name: str


@_strict
class FunctionChoice(TypedDict):
    type: Literal["function"]
    function: _Named


@_strict
class _AllowedTools(TypedDict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, fail_fast=True)]


@_strict
class _AllowedChoice(TypedDict):
    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


ToolChoice = Annotated[
    Literal["auto", "none", "required"]
    | Annotated[FunctionChoice | _AllowedChoice, Field(discriminator="type")],
    expected(
        'be "auto", "none", "required", an object that names a function, or one of type '
        "allowed_tools"
    ),
]


@_strict
class StructuredOutputs(TypedDict):
    """One of vLLM's formats."""

    json: NotRequired[str | dict[str, Any] | None]
    json_object: NotRequired[bool | None]
    regex: NotRequired[str | None]
    choice: NotRequired[list[str] | None]
    grammar: NotRequired[str | None]


@dataclass(frozen=True, slots=True)
class Calls:
    """Whether an answer calls tools."""

    tools: tuple[dict[str, Any], ...]
    """Tools that it may call, in OpenAI's format."""
    is_required: bool
    parallel: bool
    """Whether it may call several."""


@dataclass(frozen=True, slots=True)
class Format:
    """What an answer must look like."""

    param: str = ""
    """Field of the request, for errors."""
    kind: Literal["", "json", "regex", "choice", "grammar"] = ""
    """Empty: any text."""
    value: Any = None
    calls: Calls | None = None

    def grammar(self, tokenizer: HFTokenizer, prompt_end: str) -> str:
        """Return the grammar of the answer; empty where every answer matches.

        Args:
            tokenizer: of the policy.
            prompt_end: last text of the prompt.

        Raises:
            APIError: the format is invalid.
        """
        calls, answer = self.calls, ""
        try:
            if self.kind and not (calls and calls.is_required):
                answer = _GRAMMARS[self.kind](self.value)
            if calls is None or not (answer or calls.is_required):
                return answer
            functions = [tool["function"] for tool in calls.tools]
            return calls_grammar(
                tokenizer, functions, prompt_end, parallel=calls.parallel, answer=answer
            )
        except InvalidRequest as error:
            raise APIError(400, str(error), param=self.param) from error


ANY_TEXT = Format()
"""Of a request that says nothing of it."""

_GRAMMARS = {
    "json": json_grammar,
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": text_grammar,
}

GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Fields of earlier versions of vLLM, each with one format."""


def read_format(
    response_format: ResponseFormat, structured: StructuredOutputs, guided: Mapping[str, Any]
) -> Format:
    """Return the format that a request asks for.

    Args:
        response_format: OpenAI's field.
        structured: vLLM's.
        guided: those of GUIDED that are given.

    Raises:
        APIError: it asks for several, or a schema is not JSON.
    """
    found = list[Format]()
    if response_format["type"] == "json_object":
        found.append(Format("response_format", "json", {"type": "object"}))
    elif response_format["type"] == "json_schema":
        schema = response_format["json_schema"].get("schema")
        found.append(Format("response_format", "json", {} if schema is None else schema))
    for name, value in guided.items():
        kind: Any = name.removeprefix("guided_")
        found.append(Format(name, kind, value))
    for kind, value in structured.items():
        if value is None or value is False:
            continue
        if kind == "json_object":
            kind, value = "json", {"type": "object"}
        found.append(Format("structured_outputs", kind, value))  # pyright: ignore[reportArgumentType]
    if len(found) > 1:
        names = " and ".join(each.param for each in found)
        raise APIError(400, f"expected one format of the answer, found {names}", param=names)
    [only] = found or [ANY_TEXT]
    if only.kind == "json" and isinstance(only.value, str):
        return Format(only.param, "json", _parsed(only))
    if only.kind == "choice" and not only.value:
        raise APIError(400, f"expected {only.param} to have at least 1 choice", param=only.param)
    return only


def _parsed(given: Format) -> dict[str, Any]:
    try:
        schema = from_json(given.value)
    except ValueError as error:
        raise APIError(400, f"{given.param}: expected JSON: {error}", param=given.param) from None
    if not isinstance(schema, dict):
        raise APIError(400, f"expected {given.param} to be a JSON schema", param=given.param)
    return schema


def read_calls(
    choice: ToolChoice, tools: Sequence[dict[str, Any]], *, parallel: bool
) -> Calls | None:
    """Return which tools an answer may call; None if it may call none.

    Raises:
        APIError: the choice names a tool that there is not.
    """
    if choice in ("none", "auto") and not (choice == "auto" and tools):
        return None
    if not tools:
        raise APIError(400, "tool_choice requires tools, found none", param="tool_choice")
    if isinstance(choice, str):
        return Calls(tuple(tools), choice == "required", parallel)
    if choice["type"] == "function":
        # OpenAI's answers call the named function once.
        wanted, is_required, parallel = [choice], True, False
    else:
        allowed = choice["allowed_tools"]
        wanted, is_required = allowed["tools"], allowed["mode"] == "required"
    names = [each["function"]["name"] for each in wanted]
    known = {tool["function"]["name"]: tool for tool in tools}
    for name in names:
        if name not in known:
            listed = ", ".join(map(repr, known))
            message = f"expected tool_choice to name one of {listed}, found {name[:100]!r}"
            raise APIError(400, message, param="tool_choice")
    return Calls(tuple(known[name] for name in dict.fromkeys(names)), is_required, parallel)
