"""Tool calls in the formats of families of policies."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.data.tool_calls import InvalidToolCall, ToolCall
from areal_jax.data.tool_dialects import DIALECTS, choose_dialect, resembles_call

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {
                    "what": {"type": "string"},
                    "n": {"type": "integer"},
                    "deep": {"type": "boolean"},
                    "where": {"type": "object"},
                },
            },
        },
    }
]
BY_NAME = {dialect.name: dialect for dialect in DIALECTS}
FIND = ToolCall("find", {"what": "é", "n": 2})
STOP = ToolCall("stop", {})
CALLS, CALL, SEP, END, LAST = (
    f"<｜tool▁{each}｜>" for each in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
JSON = '{"what": "é", "n": 2}'
BLOCK = f"find\n```json\n{JSON}\n```"
XML = "<function=find>\n<parameter=what>\né\n</parameter>\n<parameter=n>\n2\n</parameter>\n"


def parse(dialect: str, output: str) -> tuple[str, tuple[Any, ...]]:
    content, calls = BY_NAME[dialect].parse(output, TOOLS)
    return content, calls


@pytest.mark.parametrize(
    ("dialect", "output", "content", "calls"),
    [
        ("hermes", '<tool_call>{"name": "stop"}</tool_call>', "", (STOP,)),
        ("llama", f'{{"name": "find", "parameters": {JSON}}}', "", (FIND,)),
        ("llama", f'<|python_tag|>{{"name": "find", "parameters": {JSON}}}', "", (FIND,)),
        ("llama", f'ok {{"name": "stop"}}; {{"name": "find", "arguments": {JSON}}}', "ok ",
         (STOP, FIND)),
        ("llama", '{"name": "stop", "parameters": {}} and then', "and then", (STOP,)),
        ("mistral", f'ok[TOOL_CALLS][{{"name": "find", "arguments": {JSON}}}, {{"name": "stop"}}]',
         "ok", (FIND, STOP)),
        ("mistral", f"[TOOL_CALLS]find[ARGS]{JSON}[TOOL_CALLS]stop[ARGS]{{}}", "", (FIND, STOP)),
        ("mistral", f"[TOOL_CALLS]find[CALL_ID]a1b2c3d4e[ARGS]{JSON}", "", (FIND,)),
        ("mistral", f"[TOOL_CALLS]find{JSON}", "", (FIND,)),
        ("deepseek", f"ok{CALLS}{CALL}function{SEP}{BLOCK}{END}\n{CALL}function{SEP}stop\n"
         f"```json\n{{}}\n```{END}{LAST}", "ok", (FIND, STOP)),
        ("deepseek", f"{CALLS}{CALL}find{SEP}{JSON}{END}{CALL}stop{SEP}{{}}{END}{LAST}", "",
         (FIND, STOP)),
        ("deepseek", f"{CALLS}{CALL}find{SEP}{JSON}", "", (FIND,)),
        ("harmony", "<|channel|>analysis<|message|>I think<|end|><|start|>assistant<|channel|>"
         f"commentary to=functions.find <|constrain|>json<|message|>{JSON}<|call|>", "", (FIND,)),
        ("harmony", f" to=functions.find<|channel|>commentary json<|message|>{JSON}", "", (FIND,)),
        ("harmony", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final"
         "<|message|>Done: 1 < 2<|return|>", "Done: 1 < 2", ()),
        ("harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to="
         "functions.stop<|channel|>commentary<|message|>{}<|call|>", "I look.", (STOP,)),
        ("qwen3_coder", f"ok\n<tool_call>\n{XML}</function>\n</tool_call>", "ok\n", (FIND,)),
        ("qwen3_coder", f"{XML}</function>", "", (FIND,)),
        ("qwen3_coder", f"<tool_call>\n{XML}</function>\n</tool_call>\n<tool_call>\n"
         "<function=stop>\n</function>\n</tool_call>", "", (FIND, STOP)),
        ("qwen3_coder", f"<tool_call>\n{XML}", "", (FIND,)),
    ],
)  # fmt: skip
def test_calls_and_content_of_each_dialect(
    dialect: str, output: str, content: str, calls: tuple[ToolCall, ...]
) -> None:
    assert parse(dialect, output) == (content, calls)
    assert resembles_call(output) == (dialect if calls else "")


@pytest.mark.parametrize(
    ("dialect", "invalid"),
    [
        ("llama", '{"name": "find", "parameters": {"what": }}'),
        ("llama", '{"name": 3, "parameters": {}}'),
        ("llama", '<|python_tag|>{"a"' + ":[" * 50_000),
        ("mistral", "[TOOL_CALLS][{]"),
        ("mistral", "[TOOL_CALLS]find[ARGS]{"),
        ("mistral", "[TOOL_CALLS]7"),
        ("deepseek", f"{CALLS}{CALL}find{SEP}{{END}}"),
        ("deepseek", f"{CALLS}{CALL}find{SEP}[1]{END}{LAST}"),
        ("qwen3_coder", "<function=><parameter=a>1</parameter></function>"),
    ],
)
def test_invalid_calls_stay_in_the_content_with_a_reason(dialect: str, invalid: str) -> None:
    content, calls = parse(dialect, invalid)
    assert content == invalid
    [call] = calls
    assert isinstance(call, InvalidToolCall) and len(call.reason) < 300


def test_invalid_harmony_call_has_a_reason() -> None:
    message = "<|channel|>commentary to=functions.find<|message|>{<|call|>"
    content, [call] = parse("harmony", message)
    assert content == "" and "arguments of find" in call.reason


@pytest.mark.parametrize(("dialect", "start"), [(d.name, s) for d in DIALECTS for s in d.starts])
def test_reasoning_is_not_searched_in_any_dialect(dialect: str, start: str) -> None:
    if dialect == "harmony":  # reasoning is a channel of its own
        return
    output = f"<think>{start}find</think>plain words"
    assert parse(dialect, output) == (output, ())


def test_qwen_coder_values_have_the_types_of_the_schema() -> None:
    values = {"what": "7", "n": "7", "deep": "true", "where": '{"a": [1]}', "other": "7"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in values.items())
    _, [call] = parse("qwen3_coder", f"<function=find>{body}</function>")
    assert call.arguments == {
        "what": "7",
        "n": 7,
        "deep": True,
        "where": {"a": [1]},
        "other": "7",
    }
    # What is no JSON stays text.
    _, [call] = parse("qwen3_coder", "<function=find><parameter=n>many</parameter></function>")
    assert call.arguments == {"n": "many"}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "hermes"),
        ("{{ messages }}", "hermes"),
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}', "hermes"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=x>", "qwen3_coder"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("{{ '<｜tool▁calls▁begin｜>' }}", "deepseek"),
        ("{{ '[TOOL_CALLS]' + tool_calls }}", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama"),
        ('in the format {"name": function name, "parameters": dictionary of names}', "llama"),
    ],
)
def test_template_decides_the_dialect(template: str | None, name: str) -> None:
    assert choose_dialect(template).name == name


@pytest.mark.slow
def test_parsing_any_dialect_takes_linear_time() -> None:
    # Quadratic parsing of a megabyte would exceed the time limit of a test.
    repeated = [start for dialect in DIALECTS for start in (*dialect.starts, *dialect.special)]
    repeated += [
        "<function=a",
        "<parameter=",
        "<tool_call>\n",
        "{",
        '{"name": "f"}',
        "<think>",
        "x",
    ]
    for dialect in DIALECTS:
        for text in repeated:
            output = text * (1_000_000 // len(text))
            content, _ = dialect.parse(output, TOOLS)
            assert len(content) <= len(output)


TEMPLATE = """\
{% for message in messages %}{{ message.role }}: {{ message.content }}\
{% for call in message.tool_calls %}<｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>\
{{ call.function.arguments + '' }}<｜tool▁call▁end｜>{% endfor %}
{% endfor %}"""


def deepseek_tokenizer(folder: Path) -> HFTokenizer:
    """The embedded tokenizer with DeepSeek's marks as special tokens."""
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    marks = [CALLS, CALL, SEP, END, LAST]
    tokenizer.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return HFTokenizer.from_folder(folder)


def test_special_tokens_of_calls_are_kept_and_others_are_not(tmp_path: Path) -> None:
    tokenizer = deepseek_tokenizer(tmp_path)
    text = f"ok{CALLS}{CALL}find{SEP}{JSON}{END}{LAST}"
    tokens = np.append(tokenizer.encode(text), tokenizer.stop_token_ids[0]).astype(np.int32)
    assert tokenizer.decode(tokens) == f"okfind{JSON}"
    assert tokenizer.decode_calls(tokens) == text
    assert tokenizer.tool_dialect.parse(text, TOOLS) == ("ok", (FIND,))


def test_templates_get_arguments_as_their_dialect_has_them(tmp_path: Path) -> None:
    tokenizer = deepseek_tokenizer(tmp_path)
    function = {"name": "find", "arguments": {"n": 2}}
    turn = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    assert f'find{SEP}{{"n": 2}}{END}' in tokenizer.decode_calls(tokenizer.render([turn]))
