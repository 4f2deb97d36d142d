"""Grammars of tool calls, in the dialect of the policy's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from areal_jax.data.grammars import merged_grammar, quoted
from areal_jax.data.tokenizer import HFTokenizer

Functions = Sequence[Mapping[str, Any]]
"""Functions in OpenAI's format: name, description, parameters."""


class _CallFormat(NamedTuple):
    """Texts around names and arguments of calls."""

    begin: str
    """Before the name of each call."""
    middle: str
    end: str
    separator: str | None
    """Between two calls; None: an answer has one."""
    before: str = ""
    """Before the first call."""
    after: str = ""


_HERMES = _CallFormat(
    '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n"
)
_CODER = _CallFormat("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", separator="\n")
_LLAMA = _CallFormat('{"name": "', '", "parameters": ', "}", separator="; ")
_MISTRAL = _CallFormat(
    '{"name": "', '", "arguments": ', "}", ", ", before="[TOOL_CALLS][", after="]"
)
_MISTRAL_ARGS = _CallFormat("[TOOL_CALLS]", "[ARGS]", "", separator="")
_DEEPSEEK = _CallFormat(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    separator="",
    before="<｜tool▁calls▁begin｜>",
    after="<｜tool▁calls▁end｜>",
)
_DEEPSEEK_FENCED = _DEEPSEEK._replace(
    begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    middle="\n```json\n",
    end="\n```<｜tool▁call▁end｜>",
    separator="\n",
)
_HARMONY = _CallFormat(
    "<|channel|>commentary to=functions.",
    " <|constrain|>json<|message|>",
    "",
    separator=None,
)


def _choose_format(dialect: str, template: str) -> _CallFormat:
    match dialect:
        case "qwen3_coder":
            return _CODER
        case "harmony":
            return _HARMONY
        case "llama":
            return _LLAMA
        case "mistral":
            return _MISTRAL_ARGS if "[ARGS]" in template else _MISTRAL
        case "deepseek":
            return _DEEPSEEK_FENCED if "```json" in template else _DEEPSEEK
        case _:
            return _HERMES


def calls_grammar(
    tokenizer: HFTokenizer,
    functions: Functions,
    prompt_end: str,
    *,
    parallel: bool,
    answer: str = "",
) -> str:
    """Return the grammar of an answer that calls functions, whose arguments match their schemas.

    Reasoning may come first, where the chat template knows it and has not closed it.

    Args:
        tokenizer: of the policy.
        functions: functions of which one is called.
        prompt_end: last text of the prompt.
        parallel: whether the answer may have several calls.
        answer: grammar of an answer without calls; empty: there is none.
    """
    template = tokenizer.template or ""
    form = _choose_format(tokenizer.tool_dialect.name, template)
    special = tokenizer.call_tokens

    def literal(text: str) -> str:
        pieces = (
            re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
        )
        return " ".join(
            f"<[{special[piece]}]>" if piece in special else quoted(piece)
            for piece in pieces
            if piece
        )

    schemas, rules = dict[str, Mapping[str, Any]](), list[str]()
    for number, function in enumerate(functions):
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        name = json.dumps(function["name"], ensure_ascii=False)[1:-1]
        rule, schemas[rule] = f"arguments_{number}", parameters
        arguments = f"@{rule}"
        if form is _CODER:
            del schemas[rule]
            arguments = " ".join(_elements(rule, parameters, schemas, rules))
        begin, end = literal(form.begin + name + form.middle), literal(form.end)
        rules.append(f"call_{number}: {begin} {arguments} {end}")
    one = " | ".join(f"call_{number}" for number in range(len(functions)))
    more = f"({literal(form.separator or '')} call)*" if parallel else ""
    more = "" if form.separator is None else more
    rules += [f"call: {one}", f"calls: {literal(form.before)} call {more} {literal(form.after)}"]
    start, end = "calls", prompt_end.rstrip()
    if "<think>" in template and not end.endswith("</think>"):
        opening = "" if end.endswith("<think>") else quoted("<think>")
        rules += [f"think: {opening} thought BREAKS", "thought[lazy]: /(.|\\n)*<\\/think>/"]
        rules.append("BREAKS: /\\n{0,4}/")
        start = "think? calls"
    if answer:
        start = f"@answer | {start}"
    return merged_grammar("\n".join((f"start: {start}", *rules)), schemas, answer)


def _elements(
    name: str,
    parameters: Mapping[str, Any],
    schemas: dict[str, Mapping[str, Any]],
    rules: list[str],
) -> Iterator[str]:
    """Yield a function's parameters as XML elements; values are text, or JSON by their schemas.

    Args:
        name: beginning of the names of new rules.
        parameters: schema of the arguments.
        schemas: receives the schemas of values.
        rules: receives the rules of values.
    """
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    required = parameters.get("required", ())
    for number, (key, schema) in enumerate(parameters.get("properties", {}).items()):
        rule = f"{name}_{number}"
        begin, end = quoted(f"<parameter={key}>\n"), quoted("\n</parameter>\n")
        kind = schema.get("type", "string") if isinstance(schema, dict) else None
        texts = schema.get("enum", ()) if isinstance(schema, dict) else ()
        if texts and all(isinstance(text, str) for text in texts):
            value = f"({' | '.join(map(quoted, texts))}) {end}"
        elif kind == "string" and "$ref" not in schema and "anyOf" not in schema:
            # Up to the first end of an element.
            rules.append(f"{rule}[lazy]: /(.|\\n)*\\n<\\/parameter>\\n/")
            value = rule
        else:
            schemas[rule] = schema | shared if isinstance(schema, dict) else {}
            value = f"@{rule} {end}"
        rules.append(f"element_{rule}: {begin} {value}")
        yield f"element_{rule}" + ("" if key in required else "?")
