"""Anthropic's Messages API: its request bodies, responses and streams.

A conversation is read as one of OpenAI's protocol, so that both give the same prompts: results of
tools are messages of their own, and the text and the calls of an answer are one message.

The file has more than 400 lines because requests and events of one protocol stay together.

Beyond Anthropic's fields: seed, and return_token_ids, with which a complete response has
`prompt_token_ids`, `token_ids`, `versions` and `token_logprobs`. The file has more than 400 lines
because it lists all blocks, fields and events of the API.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from jaxtyping import Int32
from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import TypedDict

from areal_jax.records import Completion
from areal_jax.serve.bodies import (
    MAX_STOPS,
    MAX_TOOLS,
    Chat,
    GenerationParams,
    NonEmpty,
    read_chat,
    require_few_messages,
)
from areal_jax.serve.responses import MakeForm, Part, TokenText, call_id, count_tokens, written
from areal_jax.serve.validation import (
    APIError,
    expected,
    strict,
    validated,
    without_ignored,
)

IGNORED = (
    "cache_control",
    "container",
    "context_management",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
)
"""Fields without effect on the answer."""

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_BLOCKS = "be a string or a list of blocks of type text, image, tool_use or tool_result"


@strict
class _TextBlock(TypedDict):
    type: Literal["text"]
    text: str


@strict
class _Base64Source(TypedDict):
    type: Literal["base64"]
    media_type: str
    data: str


@strict
class _URLSource(TypedDict):
    type: Literal["url"]
    url: str


@strict
class _ImageBlock(TypedDict):
    type: Literal["image"]
    source: Annotated[_Base64Source | _URLSource, Field(discriminator="type")]


@strict
class _ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


@strict
class _ToolResultBlock(TypedDict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: NotRequired[
        Annotated[
            str | list[Annotated[_TextBlock | _ImageBlock, Field(discriminator="type")]] | None,
            expected("be a string or a list of blocks of type text or image"),
        ]
    ]


@strict
class _ThinkingBlock(TypedDict):
    """Of another policy's answer; left out, as chat templates leave it out."""

    type: Literal["thinking", "redacted_thinking"]


_Block = Annotated[
    _TextBlock | _ImageBlock | _ToolUseBlock | _ToolResultBlock | _ThinkingBlock,
    Field(discriminator="type"),
]


@strict
class _Message(TypedDict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[str | Annotated[list[_Block], Field(fail_fast=True)], expected(_BLOCKS)]


@strict
class _Tool(TypedDict):
    name: str
    type: NotRequired[Literal["custom"] | None]
    description: NotRequired[str | None]
    input_schema: dict[str, Any]


@strict
class _ToolChoice(TypedDict):
    type: Literal["auto", "any", "tool", "none"]
    name: NotRequired[str | None]
    disable_parallel_tool_use: NotRequired[bool | None]


@strict
class _OutputFormat(TypedDict):
    type: Literal["json_schema"]
    schema: dict[str, Any]


@strict
class _OutputConfig(TypedDict):
    format: NotRequired[_OutputFormat | None]
    effort: NotRequired[str | None]


@strict
class _Thinking(TypedDict):
    type: Literal["enabled", "disabled", "adaptive"]


class _CountBody(BaseModel):
    """Fields of both endpoints."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str
    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    system: Annotated[
        str | list[_TextBlock], expected("be a string or a list of blocks of type text")
    ] = ""
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    tool_choice: _ToolChoice = {"type": "auto"}
    output_config: _OutputConfig = {}
    thinking: _Thinking | None = None

    @model_validator(mode="before")
    @classmethod
    def _given(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        return without_ignored(given, cls, IGNORED)


class _Body(_CountBody):
    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[NonEmpty], Field(max_length=MAX_STOPS, fail_fast=True)] = []
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    return_token_ids: bool = False


def read(given: dict[str, Any], max_messages: int) -> tuple[Chat, MakeForm]:
    """Validate a request for /v1/messages.

    Raises:
        APIError: It does not fit.
    """
    require_few_messages(given.get("messages"), max_messages, "messages")
    body = validated(_Body, given)
    names = ("max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "return_token_ids")
    sampling = {name: getattr(body, name) for name in names}
    chat = _chat(body, sampling | {"stop": body.stop_sequences}, max_messages)
    return chat, MessageForm.make


def read_to_count(given: dict[str, Any], max_messages: int) -> tuple[Chat, MakeForm]:
    """Validate a request for /v1/messages/count_tokens.

    Raises:
        APIError: It does not fit.
    """
    require_few_messages(given.get("messages"), max_messages, "messages")
    return _chat(validated(_CountBody, given), {}, max_messages), MessageForm.make


def _chat(body: _CountBody, more: Mapping[str, Any], max_messages: int) -> Chat:
    if body.messages[-1]["role"] == "assistant":
        raise APIError(
            400,
            "expected the last message to be of role user, found assistant: answers that the "
            "request begins are not supported",
            param="messages",
        )
    system = _text(body.system)
    messages = [{"role": "system", "content": system}] if system else []
    for place, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{place}]")
    asked = {"model": body.model, "messages": messages, "tool_choice": _choice(body.tool_choice)}
    asked["parallel_tool_calls"] = not body.tool_choice.get("disable_parallel_tool_use")
    effort = body.output_config.get("effort")
    if body.thinking is not None and body.thinking["type"] != "adaptive":
        is_off = body.thinking["type"] == "disabled"
        effort = "none" if is_off else effort or "medium"
    asked["reasoning_effort"] = effort
    if wanted := body.output_config.get("format"):
        schema = {"name": "answer", "schema": wanted["schema"]}
        asked["response_format"] = {"type": "json_schema", "json_schema": schema}
    if body.tools:
        asked["tools"] = [_function(tool) for tool in body.tools]
    # Results of tools are messages of their own: no more than there are blocks.
    return read_chat(asked | dict(more), max(max_messages, len(messages)))


def _choice(choice: _ToolChoice) -> Any:
    """Return a choice of tools as OpenAI's protocol has it."""
    name = choice.get("name")
    if choice["type"] == "tool":
        if not name:
            raise APIError(400, "you must provide tool_choice.name", param="tool_choice.name")
        return {"type": "function", "function": {"name": name}}
    return "required" if choice["type"] == "any" else choice["type"]


def _function(tool: _Tool) -> dict[str, Any]:
    """Return a tool as OpenAI's protocol has it."""
    description = tool.get("description")
    described = {"description": description} if description else {}
    function = {"name": tool["name"], **described, "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _messages(message: _Message, path: str) -> Iterator[dict[str, Any]]:
    """Return a message as those of OpenAI's protocol."""
    role, blocks = message["role"], message["content"]
    if isinstance(blocks, str):
        yield {"role": role, "content": blocks}
        return
    parts, calls = list[dict[str, Any]](), list[dict[str, Any]]()
    allowed = {
        "user": ("text", "image", "tool_result"),
        "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
        "system": ("text",),
    }[role]
    num_yielded = 0
    for place, block in enumerate(blocks):
        if block["type"] not in allowed:
            raise APIError(
                400,
                f"expected {path}.content[{place}].type to be one of {', '.join(allowed)} in a "
                f"message of role {role}, found {block['type']}",
                param=f"{path}.content[{place}].type",
            )
        if block["type"] == "text" or block["type"] == "image":
            parts.append(_part(block))
        elif block["type"] == "tool_use":
            arguments = json.dumps(block["input"], ensure_ascii=False)
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif block["type"] == "tool_result":
            if parts:
                yield {"role": role, "content": parts}
                parts = []
            content = block.get("content") or ""
            if not isinstance(content, str):
                content = [_part(each) for each in content]
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
            num_yielded += 1
    if parts or calls or not num_yielded:
        yield {"role": role, "content": parts} | ({"tool_calls": calls} if calls else {})


def _text(content: str | list[_TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block["text"] for block in content)


def _part(block: _TextBlock | _ImageBlock) -> dict[str, Any]:
    """Return a block as a part of OpenAI's protocol."""
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    source = block["source"]
    if source["type"] == "url":
        url = source["url"]
    else:
        url = f"data:{source['media_type']};base64,{source['data']}"
    return {"type": "image_url", "image_url": {"url": url}}


def error_body(refused: APIError) -> dict[str, Any]:
    """Return an error as Anthropic's API writes it."""
    kind = _ERROR_TYPES.get(
        refused.status, "invalid_request_error" if refused.status < 500 else "api_error"
    )
    return {"type": "error", "error": {"type": kind, "message": refused.message}}


@dataclass(slots=True)
class MessageForm:
    """The answer to a request for /v1/messages."""

    number: str
    generation_params: GenerationParams
    prompt: Int32[np.ndarray, "P"]
    done: bytes = b""
    _blank: str = ""
    """Blank text with which the stream begins: it is sent if other text follows, or no call."""
    _is_open: bool = field(default=False, init=False)
    """Whether the text block of the stream has begun."""

    @staticmethod
    def make(
        number: str,
        generation_params: GenerationParams,
        prompts: Sequence[Int32[np.ndarray, "_"]],
        token_text: TokenText,
        created: int,
    ) -> MessageForm:
        """Make the form of a request with one prompt."""
        return MessageForm(number, generation_params, prompts[0])

    def whole(self, parts: Sequence[Part]) -> str:
        [part] = parts
        content: list[dict[str, Any]] = []
        if part.text.strip() or (part.text and not part.calls):
            content.append({"type": "text", "text": part.text})
        content += [
            {**self._call(part, place), "input": dict(call.arguments)}
            for place, call in enumerate(part.calls)
        ]
        message = self._message(content) | _stop(part) | {"usage": self._usage(parts)}
        if self.generation_params.include_tokens:
            message |= {"prompt_token_ids": self.prompt.tolist()} | _tokens(part.sampled)
            message |= {"constrained": True} if self.generation_params.is_constrained else {}
        return written(message)

    def opening(self) -> list[dict[str, Any]]:
        nothing = {"stop_reason": None, "stop_sequence": None, "usage": self._usage(())}
        return [{"type": "message_start", "message": self._message([]) | nothing}]

    def chunk(self, part: Part) -> list[dict[str, Any]]:
        """Return the events of new text; with the last one, the calls follow."""
        events = list[dict[str, Any]]()
        self._blank += part.text
        if self._blank.strip() or self._is_open or (part.finish and not part.calls):
            text, self._blank = self._blank, ""
            if text:
                events += self._text_events(text)
        if part.finish is None:
            return events
        start = int(self._is_open)
        if self._is_open:
            events.append({"type": "content_block_stop", "index": 0})
        for place, call in enumerate(part.calls):
            index = {"index": start + place}
            block = {**self._call(part, place), "input": {}}
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            delta = {"type": "input_json_delta", "partial_json": arguments}
            events += [
                {"type": "content_block_start", **index, "content_block": block},
                {"type": "content_block_delta", **index, "delta": delta},
                {"type": "content_block_stop", **index},
            ]
        return events

    def closing(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        usage = self._usage(parts)
        return [
            {"type": "message_delta", "delta": _stop(parts[0]), "usage": usage},
            {"type": "message_stop"},
        ]

    def failure(self, refused: APIError) -> dict[str, Any]:
        return error_body(refused)

    def _text_events(self, text: str) -> Iterator[dict[str, Any]]:
        if not self._is_open:
            block = {"type": "text", "text": ""}
            yield {"type": "content_block_start", "index": 0, "content_block": block}
            self._is_open = True
        delta = {"type": "text_delta", "text": text}
        yield {"type": "content_block_delta", "index": 0, "delta": delta}

    def _call(self, part: Part, place: int) -> dict[str, Any]:
        name = part.calls[place].name
        return {"type": "tool_use", "id": call_id(self.number, part, place, "toolu"), "name": name}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.number}",
            "type": "message",
            "role": "assistant",
            "model": self.generation_params.model,
            "content": content,
        }

    def _usage(self, parts: Sequence[Part]) -> dict[str, int]:
        prompt, sampled = count_tokens([self.prompt], parts)
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return {"input_tokens": prompt, "output_tokens": sampled, **cached}


def _stop(part: Part) -> dict[str, Any]:
    """Return why an answer ended."""
    if part.stop_string is not None:
        reason = "stop_sequence"
    elif part.finish == "stop":
        reason = "tool_use" if part.calls else "end_turn"
    else:
        reason = "max_tokens"
    return {"stop_reason": reason, "stop_sequence": part.stop_string}


def _tokens(sampled: Completion) -> dict[str, Any]:
    return {
        "token_ids": sampled.tokens.tolist(),
        "versions": sampled.versions.tolist(),
        "token_logprobs": sampled.logp.tolist(),
    }
