"""OpenAI's Responses API: its request bodies, responses and streams.

The server keeps no responses: a client sends the whole conversation as input items, which are read
as a conversation of chat completions, so that both give the same prompts. The text and the calls of
an answer are one message.

The file has more than 400 lines because requests and events of one protocol stay together.

Beyond OpenAI's fields: seed, and return_token_ids, with which a response has `prompt_token_ids`,
`token_ids`, `versions` and `token_logprobs`. The file has more than 400 lines because it lists all
items, fields and events of the API.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

import numpy as np
from jaxtyping import Int32
from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import TypedDict

from areal_jax.engine.batch import MAX_TOP_LOGPROBS
from areal_jax.serve.bodies import (
    IGNORED,
    MAX_TOOLS,
    Chat,
    GenerationParams,
    read_chat,
    require_few_messages,
)
from areal_jax.serve.responses import (
    MakeForm,
    Part,
    TokenText,
    call_id,
    count_tokens,
    token_logprobs,
    written,
)
from areal_jax.serve.validation import (
    APIError,
    expected,
    only,
    strict,
    validated,
    without_ignored,
)

_IGNORED = (
    *IGNORED,
    "max_tool_calls",
    "prompt_cache_retention",
    "stream_options",
    "truncation",
)
"""Fields without effect on the answer."""

_LOGPROBS = "message.output_text.logprobs"


@strict
class _TextPart(TypedDict):
    type: Literal["input_text", "output_text", "text"]
    text: str


@strict
class _RefusalPart(TypedDict):
    type: Literal["refusal"]
    refusal: str


@strict
class _ImagePart(TypedDict):
    type: Literal["input_image"]
    image_url: str


_Part = Annotated[_TextPart | _ImagePart | _RefusalPart, Field(discriminator="type")]
_Parts = Annotated[
    str | Annotated[list[_Part], Field(fail_fast=True)],
    expected("be a string or a list of parts of type input_text, output_text or input_image"),
]


@strict
class _Message(TypedDict):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: _Parts


@strict
class _FunctionCall(TypedDict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


@strict
class _CallOutput(TypedDict):
    type: Literal["function_call_output"]
    call_id: str
    output: _Parts


@strict
class _Reasoning(TypedDict):
    """Of another policy's answer; left out, as chat templates leave it out."""

    type: Literal["reasoning"]


_Item = Annotated[_Message | _FunctionCall | _CallOutput | _Reasoning, Field(discriminator="type")]


@strict
class _Tool(TypedDict):
    type: Literal["function"]
    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


@strict
class _ReasoningConfig(TypedDict):
    effort: NotRequired[str | None]


@strict
class _PlainFormat(TypedDict):
    type: Literal["text", "json_object"]


@strict
class _SchemaFormat(TypedDict):
    type: Literal["json_schema"]
    name: NotRequired[str | None]
    schema: dict[str, Any]


@strict
class _Text(TypedDict):
    format: NotRequired[Annotated[_PlainFormat | _SchemaFormat, Field(discriminator="type")] | None]


@strict
class _FunctionChoice(TypedDict):
    type: Literal["function"]
    name: str


@strict
class _AllowedChoice(TypedDict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[_FunctionChoice]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str
    input: Annotated[list[_Item], Field(min_length=1, fail_fast=True)]
    instructions: str = ""
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    tool_choice: Annotated[
        Literal["auto", "none", "required"]
        | Annotated[_FunctionChoice | _AllowedChoice, Field(discriminator="type")],
        expected('be "auto", "none", "required", or an object of type function or allowed_tools'),
    ] = "auto"
    parallel_tool_calls: bool = True
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = []
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    text: _Text = {}
    reasoning: _ReasoningConfig = {}
    stream: bool = False
    background: Annotated[bool, only(False)] = False
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _given(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        for name in ("previous_response_id", "conversation", "prompt"):
            if given.get(name) is not None:
                raise APIError(
                    400,
                    f"{name} is not supported: the server keeps no responses; expected the whole "
                    "conversation as input",
                    param=name,
                )
        known = without_ignored(given, cls, _IGNORED)
        items = known.get("input")
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        if isinstance(items, list):
            # A message needs no type.
            known["input"] = [
                {"type": "message"} | item if isinstance(item, dict) and "role" in item else item
                for item in items
            ]
        return known


def read(given: dict[str, Any], max_messages: int) -> tuple[Chat, MakeForm]:
    """Validate a request for /v1/responses.

    Raises:
        APIError: It does not fit.
    """
    require_few_messages(given.get("input"), max_messages, "input")
    body = validated(_Body, given)
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    asked = {
        "model": body.model,
        "messages": [*instructions, *_messages(body.input)],
        "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(body.text.get("format")),
        "reasoning_effort": body.reasoning.get("effort"),
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": _LOGPROBS in body.include or body.top_logprobs > 0,
        "top_logprobs": body.top_logprobs,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "seed": body.seed,
        "return_token_ids": body.return_token_ids,
    }
    if body.tools:
        asked["tools"] = [_function(tool) for tool in body.tools]
    chat = read_chat(asked, max_messages + 1)
    return chat, partial(
        _make_form, _echo(body, given.get("tools") or [], (given.get("text") or {}).get("format"))
    )


def _choice(choice: str | _FunctionChoice | _AllowedChoice) -> Any:
    """Return a choice of tools as chat completions have it."""
    if isinstance(choice, str):
        return choice
    if choice["type"] == "function":
        return {"type": "function", "function": {"name": choice["name"]}}
    tools = [_choice(each) for each in choice["tools"]]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": tools}}


def _format(format: _PlainFormat | _SchemaFormat | None) -> dict[str, Any] | None:
    """Return a format as chat completions have it."""
    if format is None or format["type"] != "json_schema":
        return dict(format) if format else None
    schema = {"name": format.get("name") or "answer", "schema": format["schema"]}
    return {"type": "json_schema", "json_schema": schema}


def _function(tool: _Tool) -> dict[str, Any]:
    """Return a tool as chat completions have it."""
    description = tool.get("description")
    described = {"description": description} if description else {}
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], **described, "parameters": parameters}
    return {"type": "function", "function": function}


def _messages(items: Sequence[_Item]) -> list[dict[str, Any]]:
    """Return input items as messages of chat completions."""
    messages = list[dict[str, Any]]()
    for item in items:
        if item["type"] == "message":
            content = _content(item["content"])
            messages.append({"role": item["role"], "content": content})
        elif item["type"] == "function_call":
            # The calls of an answer follow its text.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif item["type"] == "function_call_output":
            content = _content(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    return messages


def _content(parts: str | list[_Part]) -> str | list[dict[str, Any]]:
    if isinstance(parts, str):
        return parts
    return [_part(part) for part in parts]


def _part(part: _TextPart | _ImagePart | _RefusalPart) -> dict[str, Any]:
    match part["type"]:
        case "input_image":
            return {"type": "image_url", "image_url": {"url": part["image_url"]}}
        case "refusal":
            return {"type": "text", "text": part["refusal"]}
        case _:
            return {"type": "text", "text": part["text"]}


def _echo(body: _Body, tools: Sequence[Any], given_format: Any) -> dict[str, Any]:
    """Return the fields of a response that repeat the request."""
    return {
        "background": False,
        "instructions": body.instructions or None,
        "max_output_tokens": body.max_output_tokens,
        "metadata": {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.get("effort"), "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": {"format": given_format or {"type": "text"}},
        "tool_choice": body.tool_choice,
        "tools": list(tools),
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "truncation": "disabled",
    }


def _make_form(
    echo: Mapping[str, Any],
    number: str,
    generation_params: GenerationParams,
    prompts: Sequence[Int32[np.ndarray, "_"]],
    token_text: TokenText,
    created: int,
) -> ResponseForm:
    return ResponseForm(echo, number, generation_params, prompts[0], token_text, created)


_Event: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class ResponseForm:
    """The answer to a request for /v1/responses."""

    echo: Mapping[str, Any]
    number: str
    generation_params: GenerationParams
    prompt: Int32[np.ndarray, "P"]
    token_text: TokenText
    created: int
    done: bytes = b""
    _num_events: int = field(default=0, init=False)
    _held: list[Part] = field(default_factory=list, init=False)
    """Parts of blank text with which the stream begins: they are sent if other text follows, or no
    call."""
    _is_open: bool = field(default=False, init=False)
    """Whether the message of the stream has begun."""

    def whole(self, parts: Sequence[Part]) -> str:
        return written(self._response(self._status(parts[0]), parts))

    def opening(self) -> list[_Event]:
        response = self._response("in_progress", ())
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def chunk(self, part: Part) -> list[_Event]:
        """Return the events of new text."""
        self._held.append(part)
        has_text = any(each.text.strip() for each in self._held)
        ends = part.finish is not None and not part.calls
        if not (has_text or self._is_open or ends):
            return []
        held, self._held = self._held, []
        return list(self._text_events(held))

    def closing(self, parts: Sequence[Part]) -> list[_Event]:
        """Return the events that end the items of the answer, and the complete response."""
        [part] = parts
        status = self._status(part)
        response = self._response(status, parts)
        events = list[_Event]()
        for index, item in enumerate(response["output"]):
            place = {"item_id": item["id"], "output_index": index}
            if item["type"] == "message":
                events += self._message_end(item, place)
            else:
                begun = item | {"arguments": "", "status": "in_progress"}
                kind, arguments = "response.function_call_arguments", item["arguments"]
                events += [
                    self._event("response.output_item.added", output_index=index, item=begun),
                    self._event(f"{kind}.delta", **place, delta=arguments),
                    self._event(f"{kind}.done", **place, name=item["name"], arguments=arguments),
                ]
            events.append(self._event("response.output_item.done", output_index=index, item=item))
        return [*events, self._event(f"response.{status}", response=response)]

    def failure(self, refused: APIError) -> _Event:
        """Return OpenAI's event, with the object that makes its client raise the error."""
        error = refused.body()["error"]
        flat = {name: error[name] for name in ("code", "message", "param")}
        return self._event("error", **flat, error=error)

    def _event(self, kind: str, **fields: Any) -> _Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _text_events(self, parts: Sequence[Part]) -> Iterator[_Event]:
        text = "".join(part.text for part in parts)
        place = {"item_id": self._message_id, "output_index": 0}
        if not self._is_open:
            self._is_open = True
            item = self._message([], "in_progress")
            yield self._event("response.output_item.added", output_index=0, item=item)
            empty = _text_part("", [])
            yield self._event("response.content_part.added", **place, content_index=0, part=empty)
        logprobs = [each for part in parts for each in self._logprobs(part)]
        if text or logprobs:
            kind = "response.output_text.delta"
            yield self._event(kind, **place, content_index=0, delta=text, logprobs=logprobs)

    def _message_end(self, item: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[_Event]:
        [part] = item["content"]
        of = {**place, "content_index": 0}
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        yield self._event("response.output_text.done", **of, **text)
        yield self._event("response.content_part.done", **of, part=part)

    @property
    def _message_id(self) -> str:
        return f"msg_{self.number}"

    def _status(self, part: Part) -> Literal["completed", "incomplete"]:
        return "completed" if part.finish == "stop" else "incomplete"

    def _response(self, status: str, parts: Sequence[Part]) -> dict[str, Any]:
        prompt, sampled = count_tokens([self.prompt], parts)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response = {
            "id": f"resp_{self.number}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "model": self.generation_params.model,
            "output": [item for part in parts for item in self._items(part, status)],
            "usage": usage if parts else None,
            **self.echo,
        }
        if self.generation_params.include_tokens and parts:
            sampling = parts[0].sampled
            response |= {
                "prompt_token_ids": self.prompt.tolist(),
                "token_ids": sampling.tokens.tolist(),
                "versions": sampling.versions.tolist(),
                "token_logprobs": sampling.logp.tolist(),
            }
            response |= {"constrained": True} if self.generation_params.is_constrained else {}
        return response

    def _items(self, part: Part, status: str) -> Iterator[dict[str, Any]]:
        if part.text.strip() or not part.calls:
            yield self._message([_text_part(part.text, self._logprobs(part))], status)
        for place, call in enumerate(part.calls):
            name = call_id(self.number, part, place)
            yield {
                "id": f"fc_{name}",
                "type": "function_call",
                "status": "completed",
                "call_id": name,
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
            }

    def _message(self, content: list[Any], status: str) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _logprobs(self, part: Part) -> list[dict[str, Any]]:
        if not self.generation_params.include_logp:
            return []
        return token_logprobs(self.token_text, part.sampled)


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
