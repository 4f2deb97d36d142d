"""Tool-call parser for model output, in the Hermes format and as plain tags.

The rules follow vLLM's `Hermes2ProToolParser` and the reasoning parser that runs before it:

- A `<think>` block is reasoning: it stays in the content and is not searched for calls. Output that
  has a `</think>` before any `<think>` begins inside a block, because the chat template opened it.
  A block without its end goes to the end of the output.
- The end tag of the last call may be missing. vLLM's pattern
  `<tool_call>(.*?)</tool_call>|<tool_call>(.*)` then takes the rest of the output, and the call is
  accepted where this rest is complete JSON.
- JSON keys other than `name` and `arguments` are ignored.

Two rules differ. An invalid call stays in the content and does not discard the valid ones beside
it; vLLM returns no call at all. Missing `arguments` are an empty object, as in SGLang.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

TOOL_CALL_START = "<tool_call>"

_THINK_START, _THINK_END = "<think>", "</think>"


class ToolCall(NamedTuple):
    name: str
    arguments: Mapping[str, Any]


class InvalidToolCall(NamedTuple):
    """A call that cannot be executed."""

    reason: str
    """What was expected and what was found, as an error message for the policy."""


class ParsedOutput(NamedTuple):
    content: str
    """The output without its valid calls and the whitespace behind each of them."""
    calls: tuple[ToolCall | InvalidToolCall, ...]
    """In the order of the output."""


class _Tagged(NamedTuple):
    tag: str
    body: str
    is_closed: bool
    start: int
    end: int


def parse_hermes(output: str) -> ParsedOutput:
    """Parse `<tool_call>{"name": NAME, "arguments": {...}}</tool_call>`.

    The content begins with all that stands before the first call, unchanged, so that this part can
    be streamed before the output is complete.
    """
    kept, calls, end = list[str](), list[ToolCall | InvalidToolCall](), 0
    for found in _tagged(output, ("tool_call",)):
        call = _hermes_call(found)
        calls.append(call)
        if isinstance(call, ToolCall):
            kept.append(output[end : found.start])
            end = found.end
    return ParsedOutput("".join((*kept, output[end:])), tuple(calls))


def parse_tags(
    output: str, parameters: Mapping[str, str]
) -> tuple[ToolCall | InvalidToolCall, ...]:
    """Parse `<NAME>ARGUMENT</NAME>`, as in Search-R1 (arXiv:2503.09516); the end tag is required.

    Args:
        parameters: Of each tool, the name of its one parameter.
    """
    return tuple(
        ToolCall(found.tag, {parameters[found.tag]: found.body})
        if found.is_closed
        else _unclosed(found.tag)
        for found in _tagged(output, tuple(parameters))
    )


def find_outside_reasoning(output: str, pattern: str) -> Iterator[re.Match[str]]:
    """Yield the matches of a pattern outside of reasoning; a dot matches every character."""
    reasoning = rf"{_THINK_START}.*?(?:{_THINK_END}|\Z)"
    either = re.compile(f"{reasoning}|(?P<found>{pattern})", re.DOTALL)
    for match in either.finditer(output, _opened(output)):
        if match["found"] is not None:
            yield match


def _tagged(output: str, tags: Sequence[str]) -> Iterator[_Tagged]:
    """Elements with one of these tags, outside of reasoning; in time linear in the output."""
    if not tags:
        return
    names = "|".join(map(re.escape, tags))
    element = rf"<(?P<tag>{names})>(?:(?P<closed>.*?)</(?P=tag)>\s*|(?P<unclosed>.*))"
    for match in find_outside_reasoning(output, element):
        is_closed = match["closed"] is not None
        body = match["closed"] if is_closed else match["unclosed"]
        yield _Tagged(match["tag"], body, is_closed, match.start(), match.end())


def _opened(output: str) -> int:
    """The end of a think block that the prompt opened; 0 where it opened none."""
    end, start = output.find(_THINK_END), output.find(_THINK_START)
    return end + len(_THINK_END) if end >= 0 and (start < 0 or end < start) else 0


def _unclosed(tag: str) -> InvalidToolCall:
    return InvalidToolCall(f"<{tag}> without </{tag}>")


def _hermes_call(found: _Tagged) -> ToolCall | InvalidToolCall:
    try:
        call = parse_json(found.body)
    except ValueError as error:
        if not found.is_closed:
            return _unclosed(found.tag)
        return InvalidToolCall(f"expected JSON inside <tool_call>: {str(error)[:100]}")
    return call_of(call, "arguments", "inside <tool_call>")


def parse_json(text: str) -> Any:
    """Parse JSON that can be written again.

    Raises:
        ValueError: it is not JSON. Lone surrogates, NaN and infinity are none: neither clients nor
            tools can be sent them.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError(f"nested too deeply: {error}") from error
    return value


def call_of(value: Any, key: str, place: str) -> ToolCall | InvalidToolCall:
    """Return the call that a JSON value describes.

    Args:
        value: object with `name` and arguments.
        key: name of the arguments.
        place: where it stands, for the error.
    """
    arguments = value.get(key, {}) if isinstance(value, dict) else None
    if not isinstance(arguments, dict) or not isinstance(value.get("name"), str):
        expected = f'a JSON object with a string "name" and an object "{key}"'
        return InvalidToolCall(f"expected {expected} {place}")
    return ToolCall(value["name"], arguments)
