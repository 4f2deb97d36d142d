"""Calls of tools in what a policy says. They are read strictly: what is no call in full is told to
the policy as an error."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from areal_jax.rewards.tools import TOOLS
from areal_jax.workflows.config import CallFormat, Hermes, Tags

MAX_CALLS = 8
"""Of one turn; what goes beyond is an error."""


class ToolCall(NamedTuple):
    tool: str
    argument: str


class BadCall(NamedTuple):
    """What was meant for a call and is none."""

    reason: str
    """What was expected and what came, for the policy to read."""


def parse_calls(
    call_format: CallFormat, said: str, names: Sequence[str]
) -> list[ToolCall | BadCall]:
    """The calls in a turn, in order; nothing where it has none. What comes before a last </think>
    is not looked at."""
    said = said.rpartition("</think>")[2]
    match call_format:
        case Hermes():
            calls = [_from_json(text, names) for text in _enclosed(said, "tool_call")]
        case Tags():
            # By place, so that results stand in the order of their calls.
            found = [(place, name, text) for name in names for place, text in _placed(said, name)]
            calls = [
                ToolCall(name, text) if text is not None else _unclosed(name)
                for _, name, text in sorted(found, key=_place)
            ]
        case _:
            raise ValueError(f"expected Hermes or Tags, came {type(call_format).__name__}")
    return calls[:MAX_CALLS] + [BadCall(f"at most {MAX_CALLS} calls a turn, came {len(calls)}")] * (
        len(calls) > MAX_CALLS
    )


def _place(found: tuple[int, str, str | None]) -> int:
    return found[0]


def _enclosed(said: str, tag: str) -> Iterator[str | None]:
    """What stands between <tag> and </tag>, each time; None where it never ends."""
    return (text for _, text in _placed(said, tag))


def _placed(said: str, tag: str) -> Iterator[tuple[int, str | None]]:
    """The same, with where it begins."""
    start, end, after = f"<{tag}>", f"</{tag}>", 0
    while (begin := said.find(start, after)) >= 0:
        after = said.find(end, begin)
        if after < 0:
            yield begin, None
            return
        yield begin, said[begin + len(start) : after]


def _unclosed(tag: str) -> BadCall:
    return BadCall(f"<{tag}> without </{tag}>")


def _from_json(text: str | None, names: Sequence[str]) -> ToolCall | BadCall:
    if text is None:
        return _unclosed("tool_call")
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadCall(f"no JSON inside <tool_call>: {str(error)[:100]}")
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
        return BadCall('expected a JSON object with "name" and "arguments" inside <tool_call>')
    name, arguments = call["name"], call["arguments"]
    if name not in names:
        return BadCall(f"no tool {str(name)[:50]!r}; there are {', '.join(names)}")
    parameter = TOOLS[name].parameter
    if (
        not isinstance(arguments, dict)
        or arguments.keys() != {parameter}
        or not isinstance(arguments[parameter], str)
    ):
        return BadCall(f'expected the arguments of {name} to be {{"{parameter}": a text}}')
    return ToolCall(name, arguments[parameter])


def announcement(call_format: CallFormat, names: Sequence[str]) -> str:
    """What tells a policy of its tools, and of how they are called."""
    match call_format:
        case Hermes():
            # Word for word as the chat templates of Qwen2.5 and Qwen3 have it, which these policies
            # have learnt.
            return (
                "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
                "You are provided with function signatures within <tools></tools> XML "
                "tags:\n<tools>\n"
                + "\n".join(json.dumps(_signature(name)) for name in names)
                + "\n</tools>\n\nFor each function call, return a json object with function name "
                "and arguments within "
                "<tool_call></tool_call> XML tags:\n<tool_call>\n"
                '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
            )
        case Tags():
            lines = (
                f"<{name}>{TOOLS[name].parameter}</{name}>: {TOOLS[name].description}"
                for name in names
            )
            return "\n".join(
                (
                    (
                        "You may call a tool by ending your turn with one of these, and are told "
                        "the "
                        "result:"
                    ),
                    *lines,
                )
            )
        case _:
            raise ValueError(f"expected Hermes or Tags, came {type(call_format).__name__}")


def _signature(name: str) -> dict[str, object]:
    """A tool as the OpenAI client describes it."""
    tool = TOOLS[name]
    parameters = {
        "type": "object",
        "properties": {tool.parameter: {"type": "string"}},
        "required": [tool.parameter],
    }
    return {
        "type": "function",
        "function": {"name": name, "description": tool.description, "parameters": parameters},
    }
