"""Formats in which families of policies call tools, chosen by the chat template.

Each dialect follows the parser of the same name in vLLM, with the rules of `tool_calls`: reasoning
is not searched for calls, an invalid call stays in the content beside valid ones, and the last call
may lack its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from areal_jax.data.tool_calls import (
    TOOL_CALL_START,
    InvalidToolCall,
    ParsedOutput,
    ToolCall,
    call_of,
    find_outside_reasoning,
    parse_hermes,
    parse_json,
)

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's format."""


class ToolDialect(NamedTuple):
    """How a family of policies calls tools."""

    name: str
    marks: tuple[str, ...]
    """Texts of which one is in every template of the family."""
    starts: tuple[str, ...]
    """Texts with which a call may begin."""
    parse: Callable[[str, Tools], ParsedOutput]
    """Parses an output, given the available tools."""
    special: tuple[str, ...] = ()
    """Special tokens that the parser reads; other special tokens have no text."""
    text_arguments: bool = False
    """Whether templates read the arguments of calls as JSON in a string."""


def choose_dialect(template: str | None) -> ToolDialect:
    """Return the dialect of a chat template; Hermes where no other is recognized."""
    for dialect in DIALECTS[1:]:
        if template is not None and any(mark in template for mark in dialect.marks):
            return dialect
    return DIALECTS[0]


def resembles_call(output: str) -> str:
    """Return the name of the dialect of which an output seems to have a call, or ""."""
    return next((name for sign, name in _SIGNS.items() if sign in output), "")


def _parse_elements(
    output: str,
    pattern: str,
    parse_one: Callable[[re.Match[str]], Sequence[ToolCall | InvalidToolCall]],
) -> ParsedOutput:
    """Parse calls that a pattern finds; the content keeps the elements without a valid call."""
    kept, calls, end = list[str](), list[ToolCall | InvalidToolCall](), 0
    for match in find_outside_reasoning(output, pattern):
        found = parse_one(match)
        calls += found
        if any(isinstance(call, ToolCall) for call in found):
            kept.append(output[end : match.start()])
            end = match.end()
    return ParsedOutput("".join((*kept, output[end:])), tuple(calls))


def _call(name: str, arguments: str) -> ToolCall | InvalidToolCall:
    """Return the call of a function with arguments in JSON."""
    try:
        return call_of({"name": name, "arguments": parse_json(arguments or "{}")}, "arguments", "")
    except ValueError as error:
        return InvalidToolCall(f"expected JSON as arguments of {name[:50]}: {str(error)[:100]}")


def _hermes(output: str, tools: Tools) -> ParsedOutput:
    return parse_hermes(output)


def _llama(output: str, tools: Tools) -> ParsedOutput:
    """Parse `{"name": NAME, "parameters": {...}}`, several separated by semicolons."""
    mark = next(find_outside_reasoning(output, re.escape(_PYTHON_TAG) + r'|\{\s*"name"'), None)
    if mark is None:
        return ParsedOutput(output, ())
    end = mark.end() if mark["found"] == _PYTHON_TAG else mark.start()
    calls, decoder = list[ToolCall | InvalidToolCall](), json.JSONDecoder()
    while (start := re.compile(r"[\s;]*").match(output, end)) and output[start.end() :][:1] == "{":
        try:
            value, end = decoder.raw_decode(output, start.end())
            parse_json(output[start.end() : end])
        except (ValueError, RecursionError) as error:
            calls.append(InvalidToolCall(f"expected a JSON object as a call: {str(error)[:100]}"))
            break
        key = "parameters" if "parameters" in value else "arguments"
        calls.append(call_of(value, key, "as a call"))
    if all(isinstance(call, ToolCall) for call in calls):
        return ParsedOutput(output[: mark.start()] + output[end:].lstrip(" ;\n"), tuple(calls))
    return ParsedOutput(output, tuple(calls))


def _mistral(output: str, tools: Tools) -> ParsedOutput:
    """Parse `[TOOL_CALLS][{"name": ..., "arguments": ...}]` and `[TOOL_CALLS]NAME[ARGS]{...}`."""

    def parse_one(match: re.Match[str]) -> Sequence[ToolCall | InvalidToolCall]:
        body = match["body"].strip()
        if not body.startswith(("[", "{")):
            name, brace, arguments = body.partition("{")
            name = re.split(r"\[(?:ARGS|CALL_ID)\]", name)[0].strip()
            if not brace:
                return [InvalidToolCall(f"expected JSON after {_TOOL_CALLS}, found {body[:50]!r}")]
            return [_call(name, brace + arguments)]
        try:
            values = parse_json(body)
        except ValueError as error:
            return [InvalidToolCall(f"expected JSON after {_TOOL_CALLS}: {str(error)[:100]}")]
        values = values if isinstance(values, list) else [values]
        return [call_of(value, "arguments", f"after {_TOOL_CALLS}") for value in values]

    mark = re.escape(_TOOL_CALLS)
    return _parse_elements(output, rf"{mark}(?P<body>.*?)(?={mark}|\Z)", parse_one)


def _deepseek(output: str, tools: Tools) -> ParsedOutput:
    """Parse the calls of DeepSeek V3 (JSON in a code block) and V3.1 (JSON alone)."""
    begin, separator, end = (f"<｜tool▁{each}｜>" for each in ("call▁begin", "sep", "call▁end"))
    pattern = (
        rf"(?:<｜tool▁calls▁begin｜>\s*)?{begin}(?P<name>[^<]{{0,200}}){separator}(?P<body>.*?)"
        rf"(?:{end}|\Z)\s*(?:<｜tool▁calls▁end｜>)?"
    )

    def parse_one(match: re.Match[str]) -> Sequence[ToolCall | InvalidToolCall]:
        fenced = re.fullmatch(r"\s*(\S+)\n```json\n(.*?)\n?```\s*", match["body"], re.DOTALL)
        if fenced is not None:
            return [_call(fenced[1], fenced[2])]
        return [_call(match["name"].strip(), match["body"].strip())]

    return _parse_elements(output, pattern, parse_one)


def _harmony(output: str, tools: Tools) -> ParsedOutput:
    """Parse the channels of GPT-OSS: calls are messages to `functions.NAME`.

    The content is what the policy says to the user: the channel `final`, and what it says in
    `commentary` to nobody else.
    """
    content, calls = list[str](), list[ToolCall | InvalidToolCall]()

    def finish(head: str, body: str) -> None:
        recipient = re.search(r"to=functions\.([^\s<]+)", head)
        if recipient is not None:
            calls.append(_call(recipient[1], body.strip()))
        elif "<|channel|>final" in head or "<|channel|>commentary" in head:
            content.append(body)

    head, body, num_messages = "", None, 0
    for piece in (*re.split("(" + "|".join(map(re.escape, _HARMONY)) + ")", output), "<|end|>"):
        if piece not in _HARMONY:
            head, body = (head + piece, None) if body is None else (head, body + piece)
        elif piece == "<|message|>":
            body, num_messages = "", num_messages + 1
        else:
            if body is not None:
                finish(head, body)
                head, body = "", None
            # The role of the next message follows <|start|>.
            head = head + piece if piece in (_CHANNEL, "<|constrain|>") else ""
    return ParsedOutput("".join(content) if num_messages else output, tuple(calls))


def _qwen_coder(output: str, tools: Tools) -> ParsedOutput:
    """Parse `<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>`.

    Values are text; those of parameters whose schema has another type are JSON.
    """
    schemas = {
        tool["function"]["name"]: (tool["function"].get("parameters") or {}).get("properties") or {}
        for tool in tools
    }
    pattern = (
        r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]{0,200})>(?P<body>.*?)"
        r"(?:</function>|(?=</tool_call>)|\Z)(?:\s*</tool_call>)?\s*"
    )
    parameter = re.compile(
        r"<parameter=([^>\n]{0,200})>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL
    )

    def parse_one(match: re.Match[str]) -> Sequence[ToolCall | InvalidToolCall]:
        name = match["name"].strip()
        arguments = {
            key.strip(): _typed(value, schemas.get(name, {}).get(key.strip()))
            for key, value in parameter.findall(match["body"])
        }
        if not name:
            return [InvalidToolCall("expected <function=NAME>, found no name")]
        return [ToolCall(name, arguments)]

    return _parse_elements(output, pattern, parse_one)


def _typed(text: str, schema: Any) -> Any:
    """Return the value of a parameter, without the line breaks around it."""
    text = text.removeprefix("\n").removesuffix("\n")
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind in (None, "string"):
        return text
    try:
        return parse_json(text)
    except ValueError:
        return text


_PYTHON_TAG, _TOOL_CALLS, _CHANNEL = "<|python_tag|>", "[TOOL_CALLS]", "<|channel|>"
_RECIPIENT = " to=functions."
_DEEPSEEK = tuple(
    f"<｜tool▁{each}｜>" for each in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
_HARMONY = tuple(
    f"<|{each}|>" for each in ("start", "channel", "constrain", "message", "end", "call", "return")
)

_SIGNS = {
    "<function=": "qwen3_coder",
    _RECIPIENT: "harmony",
    _DEEPSEEK[1]: "deepseek",
    _TOOL_CALLS: "mistral",
    TOOL_CALL_START: "hermes",
    _PYTHON_TAG: "llama",
    '{"name"': "llama",
}
"""Dialects by a text of their calls alone; the last two are in calls of others, too."""

DIALECTS = (
    ToolDialect("hermes", (), (TOOL_CALL_START,), _hermes),
    ToolDialect("qwen3_coder", ("<function=",), ("<tool_call>", "<function="), _qwen_coder),
    ToolDialect("harmony", (_CHANNEL,), (_CHANNEL, _RECIPIENT), _harmony, _HARMONY),
    ToolDialect("deepseek", _DEEPSEEK[:2], _DEEPSEEK[:2], _deepseek, _DEEPSEEK, True),
    ToolDialect(
        "mistral", (_TOOL_CALLS,), (_TOOL_CALLS,), _mistral, (_TOOL_CALLS, "[ARGS]", "[CALL_ID]")
    ),
    ToolDialect(
        "llama", (_PYTHON_TAG, '"parameters": dictionary'), (_PYTHON_TAG, '{"name"'), _llama,
        (_PYTHON_TAG,),
    ),
)  # fmt: skip
"""All dialects; the first one is the default."""
