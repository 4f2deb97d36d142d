"""Tools in a conversation: their description for the policy, and the calls in its turns."""

from __future__ import annotations

import json
from collections.abc import Sequence

from areal_jax.data.tool_calls import InvalidToolCall, ToolCall, parse_hermes, parse_tags
from areal_jax.rewards.tools import TOOLS
from areal_jax.workflows.config import CallFormat, Hermes, Tags

MAX_CALLS = 8
"""Of one turn; further calls are an error."""


def parse_calls(
    call_format: CallFormat, output: str, names: Sequence[str]
) -> list[ToolCall | InvalidToolCall]:
    """Parse the calls of a turn, in order.

    A `ToolCall` names one of the tools and has its one argument, a string.

    Args:
        names: Of the available tools. Tags with other names are text.
    """
    match call_format:
        case Hermes():
            calls = [_checked(call, names) for call in parse_hermes(output).calls]
        case Tags():
            calls = list(parse_tags(output, {name: TOOLS[name].parameter for name in names}))
        case _:
            raise ValueError(f"expected Hermes or Tags, found {type(call_format).__name__}")
    if len(calls) > MAX_CALLS:
        reason = f"expected at most {MAX_CALLS} calls in a turn, found {len(calls)}"
        return [*calls[:MAX_CALLS], InvalidToolCall(reason)]
    return calls


def _checked(call: ToolCall | InvalidToolCall, names: Sequence[str]) -> ToolCall | InvalidToolCall:
    if isinstance(call, InvalidToolCall):
        return call
    if call.name not in names:
        expected = ", ".join(names)
        return InvalidToolCall(f"unknown tool {call.name[:50]!r}; available tools: {expected}")
    parameter = TOOLS[call.name].parameter
    if call.arguments.keys() != {parameter} or not isinstance(call.arguments[parameter], str):
        expected = f'{{"{parameter}": a string}}'
        return InvalidToolCall(f"expected the arguments of {call.name} to be {expected}")
    return call


def announcement(call_format: CallFormat, names: Sequence[str]) -> str:
    """Return the system message that describes the tools and the call format."""
    match call_format:
        case Hermes():
            # Word for word as in the chat templates of Qwen2.5 and Qwen3, which are trained on it.
            return (
                "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
                "You are provided with function signatures within <tools></tools> XML tags:\n"
                "<tools>\n" + "\n".join(json.dumps(_signature(name)) for name in names) + "\n"
                "</tools>\n\nFor each function call, return a json object with function name and "
                "arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
                '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
            )
        case Tags():
            head = (
                "You may call a tool by ending your turn with one of these, "
                "and are told the result:"
            )
            lines = (
                f"<{name}>{TOOLS[name].parameter}</{name}>: {TOOLS[name].description}"
                for name in names
            )
            return "\n".join((head, *lines))
        case _:
            raise ValueError(f"expected Hermes or Tags, found {type(call_format).__name__}")


def _signature(name: str) -> dict[str, object]:
    """Return a tool as OpenAI's API describes it."""
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
