"""What clients ask for: bodies of OpenAI's protocol, read strictly, with errors as OpenAI's own API
gives them.

Beside OpenAI's fields: top_k, min_p, min_tokens, repetition_penalty, stop_token_ids, and
return_token_ids, which adds the token ids of prompt and answer and the version of the weights that
drew each token.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_jax.engine.batch import MAX_STOP_TOKENS, MAX_TOP_LOGPROBS
from areal_jax.engine.config import MAX_TOP_K

MAX_STOPS = 16
"""Stop strings of one request; OpenAI allows 4."""

MAX_TOOLS = 128
"""Tools of one request: OpenAI's limit."""

_MAX_MESSAGE = 1000
"""Characters of an error message: it may quote the request."""

IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
)
"""Fields that say nothing about the answer, or nothing that could be otherwise here."""


class APIError(Exception):
    """A request that is not answered, with what the client is told."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        message = message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + "..."
        super().__init__(message)
        self.status, self.message, self.code, self.param = (
            status,
            message,
            code,
            param and param[:_MAX_MESSAGE],
        )

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's API writes it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """How an answer is to be sampled and told."""

    model: str
    num_samples: int
    max_new_tokens: int | None
    stream: bool
    include_usage: bool
    """Whether a stream ends with the count of tokens."""
    stops: tuple[str, ...]
    seed: int | None
    sampling: Mapping[str, Any]
    """Fields of `records.Sampling` that were given."""
    stop_tokens: tuple[int, ...]
    """Beside those of the policy."""
    include_logp: bool
    include_tokens: bool


@dataclass(frozen=True, slots=True)
class Chat:
    generation_params: GenerationParams
    turns: tuple[dict[str, Any], ...]
    """The conversation as chat templates read it."""
    tools: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Texts:
    generation_params: GenerationParams
    prompts: tuple[str | tuple[int, ...], ...]
    """Texts, or tokens."""


def require_key(shown: str, right: str, owner: str) -> None:
    """Refuse a bearer token that is not the right one."""
    # In constant time: how long it takes tells nothing of the right one. Bytes of a header that are
    # no text come as surrogates.
    shown_bytes, right_bytes = (key.encode(errors="surrogateescape") for key in (shown, right))
    if not hmac.compare_digest(shown_bytes, right_bytes):
        raise APIError(401, f"Incorrect API key provided: expected {owner}", code="invalid_api_key")


def read_json(body: bytes, max_values: int) -> dict[str, Any]:
    """The object that a body holds.

    Args: max_values: refuse a body of more commas and opening brackets, in texts too. Parsing it
        would hold the interpreter's lock."""
    num_values = sum(body.count(mark) for mark in (b",", b"[", b"{"))
    if num_values > max_values:
        expected = f"expected at most limits.max_body_values={max_values}"
        raise APIError(413, f"the body has {num_values} commas and brackets, {expected}")
    try:
        given = _parsed(body)
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"We could not parse the JSON body of your request: {error}") from None
    if not isinstance(given, dict):
        raise APIError(400, f"expected a JSON object as body, came {_kind(given)}")
    return given


def _parsed(text: str | bytes) -> Any:
    """What JSON says. ValueError or RecursionError where it is none, or holds what cannot be
    written again: half a character (a lone surrogate), or more brackets in one another than there
    is room for."""
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def read_chat(given: Mapping[str, Any], max_messages: int = 1 << 20) -> Chat:
    """A request for /v1/chat/completions."""
    body = Body(given)
    messages = body.take("messages", list)
    if not messages:
        raise APIError(400, "expected at least one message", param="messages")
    if len(messages) > max_messages:
        expected = f"expected at most limits.max_messages={max_messages}"
        raise APIError(
            400,
            f"{len(messages)} messages, {expected}",
            code="context_length_exceeded",
            param="messages",
        )
    turns = tuple(_turn(message, f"messages[{place}]") for place, message in enumerate(messages))
    choice = body.take("tool_choice", str, "auto")
    if choice not in ("auto", "none"):
        raise APIError(
            400,
            f"tool_choice={choice!r} is not supported; expected auto or none",
            param="tool_choice",
        )
    given_tools = body.take("tools", list, [])
    if len(given_tools) > MAX_TOOLS:
        raise APIError(
            400, f"{len(given_tools)} tools, expected at most {MAX_TOOLS}", param="tools"
        )
    tools = tuple(_tool(tool, f"tools[{place}]") for place, tool in enumerate(given_tools))
    form = body.take("response_format", dict, {"type": "text"})
    if form != {"type": "text"}:
        raise APIError(
            400,
            f"response_format={json.dumps(form)[:200]} is not supported; expected text",
            param="response_format",
        )
    include_logp = body.take("logprobs", bool, False)
    num_top_logprobs = body.take("top_logprobs", int, 0, low=0, high=MAX_TOP_LOGPROBS)
    if num_top_logprobs and not include_logp:
        raise APIError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    budget = body.take("max_completion_tokens", int, None, low=1)
    old_budget = body.take("max_tokens", int, None, low=1)
    generation_params = _generation_params(
        body, old_budget if budget is None else budget, include_logp, num_top_logprobs
    )
    return Chat(generation_params, turns, tools if choice == "auto" else ())


def read_texts(given: Mapping[str, Any]) -> Texts:
    """A request for /v1/completions."""
    body = Body(given)
    prompt = body.take("prompt", (str, list))
    several = prompt if isinstance(prompt, list) and not _are_tokens(prompt) else [prompt]
    prompts = tuple(tuple(each) if isinstance(each, list) else each for each in several)
    if not prompts or not all(
        each and (isinstance(each, str) or _are_tokens(each)) for each in prompts
    ):
        raise APIError(
            400,
            "expected a text, token ids, or a list of either, none of them empty",
            param="prompt",
        )
    for name, nothing in (("echo", False), ("suffix", "")):
        if body.take(name, type(nothing), nothing) != nothing:
            raise APIError(400, f"{name} is not supported", param=name)
    num_logp = body.take("logprobs", int, None, low=0, high=MAX_TOP_LOGPROBS)
    best_of = body.take("best_of", int, None)
    generation_params = _generation_params(
        body, body.take("max_tokens", int, 16, low=1), num_logp is not None, num_logp or 0
    )
    if best_of not in (None, generation_params.num_samples):
        raise APIError(
            400,
            f"best_of={best_of} is not supported; expected the same as n, or nothing",
            param="best_of",
        )
    return Texts(generation_params, prompts)


def _generation_params(
    body: Body, max_new_tokens: int | None, include_logp: bool, num_top_logprobs: int
) -> GenerationParams:
    """What both kinds of requests have in common; the end of the body."""
    stops = body.take("stop", (str, list), [])
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    if len(stops) > MAX_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise APIError(400, f"expected at most {MAX_STOPS} texts, none of them empty", param="stop")
    stop_tokens = tuple(body.take("stop_token_ids", list, []))
    if len(stop_tokens) > MAX_STOP_TOKENS or not _are_tokens((0, *stop_tokens)):
        raise APIError(400, f"expected at most {MAX_STOP_TOKENS} token ids", param="stop_token_ids")
    if body.take("logit_bias", dict, {}):
        raise APIError(400, "logit_bias is not supported", param="logit_bias")
    given = {
        "temperature": body.take("temperature", float, None, low=0, high=2),
        "top_p": body.take("top_p", float, None, low=1e-6, high=1),
        "top_k": body.take("top_k", int, None, low=0, high=MAX_TOP_K),
        "min_p": body.take("min_p", float, None, low=0, high=1),
        "min_new_tokens": body.take("min_tokens", int, None, low=0),
        "presence_penalty": body.take("presence_penalty", float, None, low=-2, high=2),
        "frequency_penalty": body.take("frequency_penalty", float, None, low=-2, high=2),
        "repetition_penalty": body.take("repetition_penalty", float, None, low=0.01, high=100),
        "num_top_logprobs": num_top_logprobs or None,
    }
    stream = body.take("stream", bool, False)
    generation_params = GenerationParams(
        model=body.take("model", str),
        num_samples=body.take("n", int, 1, low=1),
        max_new_tokens=max_new_tokens,
        stream=stream,
        include_usage=bool(body.take("stream_options", dict, {}).get("include_usage")),
        stops=stops,
        seed=body.take("seed", int, None),
        sampling={name: value for name, value in given.items() if value is not None},
        stop_tokens=stop_tokens,
        include_logp=include_logp,
        include_tokens=body.take("return_token_ids", bool, False),
    )
    body.end()
    return generation_params


class Body:
    """Fields of a request, each taken once; null is as if it was not given."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._left = {
            name: value
            for name, value in given.items()
            if value is not None and name not in IGNORED
        }

    def take(
        self,
        name: str,
        kind: type | tuple[type, ...],
        *default: Any,
        low: int | float | None = None,
        high: int | float | None = None,
    ) -> Any:
        """A field of a kind, within bounds; the default where it is not given, Refused where there
        is none."""
        if name not in self._left:
            if not default:
                raise APIError(400, f"you must provide {name}", param=name)
            return default[0]
        value, kinds = self._left.pop(name), kind if isinstance(kind, tuple) else (kind,)
        if kinds == (float,) and type(value) is int:
            value = float(value) if abs(value) < 2**53 else float("inf")
        if type(value) not in kinds:
            names = " or ".join(_NAMES[each] for each in kinds)
            raise APIError(400, f"expected {name} to be {names}, came {_kind(value)}", param=name)
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            bounds = f"{low} or more" if high is None else f"from {low} to {high}"
            raise APIError(400, f"expected {name} to be {bounds}, came {value}", param=name)
        return value

    def end(self) -> None:
        """Refuse what nobody has taken."""
        for name in self._left:
            raise APIError(400, f"Unrecognized request argument supplied: {name}", param=name)


_NAMES = {
    str: "a text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def _kind(value: object) -> str:
    return _NAMES.get(type(value), "null")


def _are_tokens(given: Any) -> bool:
    """Whether these are token ids, at least one."""
    are_several = isinstance(given, list | tuple) and len(given) > 0
    return are_several and all(type(token) is int and 0 <= token < 2**31 for token in given)


def _turn(message: Any, where: str) -> dict[str, Any]:
    """A message as chat templates read it: content as one text, arguments of tool calls as
    objects."""
    if not isinstance(message, dict):
        raise APIError(400, f"expected an object, came {_kind(message)}", param=where)
    role, content, calls = (
        message.get("role"),
        message.get("content"),
        message.get("tool_calls") or [],
    )
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise APIError(
            400,
            f"expected a role of system, developer, user, assistant or tool, came {role!r}",
            param=where,
        )
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) < len(content) or not all(
            isinstance(part.get("text"), str) for part in parts
        ):
            raise APIError(
                400,
                "expected content of texts only: this policy neither sees nor hears",
                param=where,
            )
        content = "".join(part["text"] for part in parts)
    if not isinstance(content, str) and not (content is None and calls and role == "assistant"):
        raise APIError(400, f"expected content to be a text, came {_kind(content)}", param=where)
    turn: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": content or "",
    }
    if role == "assistant" and calls:
        if not isinstance(calls, list):
            raise APIError(
                400, f"expected tool_calls to be a list, came {_kind(calls)}", param=where
            )
        turn["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)
        ]
    return turn | {
        name: message[name]
        for name in ("name", "tool_call_id")
        if isinstance(message.get(name), str)
    }


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise APIError(400, "expected a function with a name", param=where)
    try:
        arguments = _parsed(function.get("arguments") or "{}")
    except (ValueError, TypeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise APIError(
            400, "expected the arguments of a function to be a JSON object in a text", param=where
        )
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tool(tool: Any, where: str) -> dict[str, Any]:
    function = (
        tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    )
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise APIError(
            400, "expected a tool of type function, with a function that has a name", param=where
        )
    return tool
