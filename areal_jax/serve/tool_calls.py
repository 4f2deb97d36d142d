"""Calls of tools in what a policy says, in the form of Hermes and Qwen: <tool_call>{"name",
"arguments"}</tool_call>."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

BEGIN = "<tool_call>"

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|\Z)", re.DOTALL)


class ToolCall(NamedTuple):
    name: str
    arguments: str
    """As JSON."""


def parse_tool_calls(said: str) -> tuple[str, tuple[ToolCall, ...]]:
    """What is said beside the calls, and the calls. What is no call in full stays in the text."""
    calls = list[ToolCall]()

    def take(match: re.Match[str]) -> str:
        call = _parse(match[1])
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    text = _CALL.sub(take, said)
    return (text.strip() if calls else text), tuple(calls)


def _parse(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        found = ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
        # Half a character (a lone surrogate) can be told to nobody.
        "".join(found).encode()
    except (ValueError, RecursionError):
        return None
    return found
