"""Request bodies of OpenAI's protocol, validated strictly, with errors in the form of OpenAI's API.

Beyond OpenAI's fields: top_k, min_p, min_tokens, repetition_penalty, stop_token_ids, and
return_token_ids, which returns the token ids of prompt and answer and the weight version of each
sampled token.

The file has more than 400 lines because it lists all fields of the API.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    model_validator,
)
from pydantic_core import from_json
from typing_extensions import TypedDict

from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.engine.batch import MAX_STOP_TOKENS, MAX_TOP_LOGPROBS
from areal_jax.engine.config import MAX_TOP_K
from areal_jax.image_files import ImageFile, read_image
from areal_jax.records import Message
from areal_jax.serve.structured_outputs import (
    ANY_TEXT,
    GUIDED,
    Format,
    ResponseFormat,
    StructuredOutputs,
    ToolChoice,
    read_calls,
    read_format,
)
from areal_jax.serve.validation import (
    APIError,
    describe,
    expected,
    only,
    strict,
    validated,
    without_ignored,
)

MAX_STOPS = 16
"""Stop strings of one request; OpenAI allows 4."""

MAX_TOOLS = 128
"""Tools of one request: OpenAI's limit."""

IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "verbosity",
)
"""Fields without effect on the answer."""


OF_TEXT = (
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "detokenize",
    "prompt_logprobs",
)
"""Sampling parameters of vLLM that say how tokens become text; an answer in tokens has none."""


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """Parameters of generation and of the response."""

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
    """In addition to those of the policy."""
    include_logp: bool
    include_tokens: bool
    images: tuple[ImageFile, ...] = ()
    """Images of the conversation, in order."""
    format: Format = ANY_TEXT
    """What the answers must look like."""

    @property
    def is_constrained(self) -> bool:
        """Whether log-probs are of the tokens that the format allows."""
        sampling = self.sampling
        return bool(sampling.get("grammar")) and not sampling.get("unmasked_logprobs")


class RemoteImage(NamedTuple):
    """An image that the client names by its URL."""

    url: str
    number: int
    """Its place in `GenerationParams.images`, which is empty."""
    path: str
    """Field of the request, for errors."""


@dataclass(frozen=True, slots=True)
class Chat:
    generation_params: GenerationParams
    turns: tuple[dict[str, Any], ...]
    """The conversation as chat templates read it."""
    tools: tuple[dict[str, Any], ...]
    remote_images: tuple[RemoteImage, ...] = ()
    """Images that are still to be fetched."""
    reasoning_effort: str = ""
    """Empty: the request says nothing of it."""

    def template_variables(self, tokenizer: HFTokenizer) -> dict[str, Any]:
        """Return further variables of the chat template."""
        # An answer in a format has no room for reasoning.
        effort = self.reasoning_effort or ("none" if self.generation_params.format.kind else "")
        return tokenizer.reasoning_variables(effort) if effort else {}


@dataclass(frozen=True, slots=True)
class Texts:
    generation_params: GenerationParams
    prompts: tuple[str | tuple[int, ...], ...]
    """Texts, or tokens."""
    echo: bool = False
    """Whether answers begin with their prompts."""


def require_key(shown: str, right: str, owner: str) -> None:
    """Refuse a bearer token that is not the right one."""
    # In constant time, which reveals nothing about the right one. Bytes of a header that are not
    # text are surrogates.
    shown_bytes, right_bytes = (key.encode(errors="surrogateescape") for key in (shown, right))
    if not hmac.compare_digest(shown_bytes, right_bytes):
        raise APIError(401, f"Incorrect API key provided: expected {owner}", code="invalid_api_key")


def read_json(body: bytes, max_values: int) -> dict[str, Any]:
    """Parse a body that is a JSON object.

    Args:
        max_values: Commas and opening brackets, in strings too; a body with more is refused before
            it is parsed, because parsing holds the interpreter's lock.
    """
    num_values = sum(body.count(mark) for mark in (b",", b"[", b"{"))
    if num_values > max_values:
        expected = f"expected at most limits.max_body_values={max_values}"
        raise APIError(413, f"the body has {num_values} commas and brackets, {expected}")
    try:
        # Refuses lone surrogates and nesting deeper than 200, which could not be written again.
        given = from_json(body)
    except ValueError as error:
        raise APIError(400, f"We could not parse the JSON body of your request: {error}") from None
    if not isinstance(given, dict):
        raise APIError(400, f"expected the body to be a JSON object, found {describe(given)}")
    return given


def read_chat(given: Mapping[str, Any], max_messages: int = 1 << 20) -> Chat:
    """Validate a request for /v1/chat/completions."""
    require_few_messages(given.get("messages"), max_messages, "messages")
    tools = given.get("tools")
    body = validated(_ChatBody, given)
    if body.top_logprobs and not body.logprobs:
        found = f"top_logprobs={body.top_logprobs} and logprobs=false"
        raise APIError(400, f"top_logprobs requires logprobs=true, found {found}", param="logprobs")
    budget = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    # Templates read tools as the client wrote them, with the order of their keys.
    generation_params = body.generation_params(budget, body.top_logprobs if body.logprobs else None)
    images, remote_images = _images(body.messages)
    calls = read_calls(body.tool_choice, tools or (), parallel=body.parallel_tool_calls)
    if isinstance(body.tool_choice, dict) and body.tool_choice["type"] == "allowed_tools":
        tools = list(calls.tools) if calls else []
    wanted = replace(generation_params.format, calls=calls)
    if calls is not None and calls.is_required:
        wanted = replace(wanted, param="tools")
    return Chat(
        replace(generation_params, images=images, format=wanted),
        tuple(_turn(message, f"messages[{place}]") for place, message in enumerate(body.messages)),
        tuple(tools) if tools and calls is not None else (),
        remote_images,
        body.reasoning_effort,
    )


class Scored(NamedTuple):
    """A conversation to be scored."""

    model: str | None
    messages: tuple[Message, ...]
    """All before the answer."""
    answer: str
    use_activation: bool
    """Whether the result is the sigmoid of the score."""


def read_scored(given: Mapping[str, Any], max_messages: int) -> Scored:
    """Validate a request for /classify."""
    require_few_messages(given.get("messages"), max_messages, "messages")
    body = validated(_ClassifyBody, without_ignored(given, _ClassifyBody, IGNORED))
    *before, last = (
        _turn(message, f"messages[{place}]") for place, message in enumerate(body.messages)
    )
    if last["role"] != "assistant":
        raise APIError(
            400,
            f"expected a conversation that ends with an answer of the assistant, found the role "
            f"{last['role']}",
            param="messages",
        )
    if not all(isinstance(turn.get("content"), str) for turn in (*before, last)):
        raise APIError(400, "expected messages of text alone", param="messages")
    messages = tuple(Message(turn["role"], turn["content"]) for turn in before)
    return Scored(body.model, messages, last["content"], body.use_activation)


def require_few_messages(messages: object, max_messages: int, name: str) -> None:
    """Refuse a conversation with too many messages before they are validated."""
    if isinstance(messages, list) and len(messages) > max_messages:
        found = f"at most limits.max_messages={max_messages} items, found {len(messages)}"
        message = f"expected {name} to have {found}"
        raise APIError(400, message, code="context_length_exceeded", param=name)


def read_texts(given: Mapping[str, Any]) -> Texts:
    """Validate a request for /v1/completions."""
    body = validated(_TextsBody, given)
    if body.best_of not in (None, body.n):
        message = f"expected best_of to be n={body.n}, found {body.best_of}"
        raise APIError(400, message, param="best_of")
    if not body.echo and not body.max_tokens:
        message = "expected max_tokens to be at least 1 without echo, found 0"
        raise APIError(400, message, param="max_tokens")
    if body.echo and body.stream:
        message = "expected stream to be false with echo, found true"
        raise APIError(400, message, param="stream")
    prompts = tuple(tuple(prompt) if isinstance(prompt, list) else prompt for prompt in body.prompt)
    return Texts(body.generation_params(body.max_tokens, body.logprobs), prompts, body.echo)


def read_tokens(given: Mapping[str, Any]) -> Texts:
    """Validate a request for /inference/v1/generate: one prompt of token ids, and vLLM's
    `sampling_params`.
    """
    body = validated(_TokensBody, given)
    sampling = {
        name: value
        for name, value in body.sampling_params.items()
        if name not in OF_TEXT and (name, value) != ("top_k", -1)  # vLLM's "no filter"
    }
    if type(sampling.get("logprobs")) is int:
        # Answers have the log-probability of each sampled token, and no other token's.
        sampling["logprobs"] = min(sampling["logprobs"], 0)
    fixed = {"model": body.model, "prompt": body.token_ids, "return_token_ids": True}
    if clash := sorted(fixed.keys() & sampling.keys()):
        raise APIError(400, f"Unrecognized sampling parameter supplied: {clash[0]}", param=clash[0])
    return read_texts(sampling | fixed)


def _is_tokens(given: list[Any]) -> bool:
    return bool(given) and isinstance(given[0], int)


NonEmpty = Annotated[str, Field(min_length=1)]
_Token = Annotated[int, Field(ge=0, lt=2**31)]
_Arguments = Json[dict[str, Any]] | Literal[""]
_Tokens = Annotated[list[_Token], Field(min_length=1, fail_fast=True)]
_Several = BeforeValidator(
    lambda value: [value] if not isinstance(value, list) or _is_tokens(value) else value
)
"""A list, where one string or one list of token ids is a list of one."""


_CONTENT = "a string or a list of parts of type text or image_url"


@strict
class _CalledFunction(TypedDict):
    name: str
    arguments: NotRequired[Annotated[_Arguments | None, expected("be a JSON object in a string")]]


@strict
class _ToolCall(TypedDict):
    function: _CalledFunction


@strict
class _TextPart(TypedDict):
    type: Literal["text"]
    text: str


@strict
class _ImageURL(TypedDict):
    url: str
    detail: NotRequired[str | None]


@strict
class _ImagePart(TypedDict):
    type: Literal["image_url"]
    image_url: _ImageURL


_Part = Annotated[_TextPart | _ImagePart, Field(discriminator="type")]
_Parts = Annotated[list[_Part], Field(fail_fast=True)]


@strict
class _Message(TypedDict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: NotRequired[Annotated[list[_ToolCall], Field(fail_fast=True)] | None]
    content: NotRequired[Annotated[str | _Parts | None, expected(f"be {_CONTENT}")]]
    name: NotRequired[str | None]
    tool_call_id: NotRequired[str | None]


@strict
class _Function(TypedDict):
    name: str


@strict
class _Tool(TypedDict):
    type: Literal["function"]
    function: _Function


@strict
class _StreamOptions(TypedDict):
    include_usage: NotRequired[bool | None]


def _turn(message: _Message, path: str) -> dict[str, Any]:
    """Return a message as chat templates read it: content is one string, or a list of parts if it
    has images; arguments are objects.
    """
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
    calls = calls if role == "assistant" else None
    if content is None and not calls:
        raise APIError(
            400, f"expected {path}.content to be {_CONTENT}, found null", param=f"{path}.content"
        )
    if isinstance(content, list):
        content = _content(content)
        if isinstance(content, list) and role not in ("user", "tool"):
            raise APIError(
                400,
                f"expected images in messages of the user and of tools, found one in {path}",
                param=path,
            )
    turn: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": content or "",
    }
    if calls:
        functions = [
            {"name": call["function"]["name"], "arguments": call["function"].get("arguments") or {}}
            for call in calls
        ]
        turn["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return turn | {
        name: value for name in ("name", "tool_call_id") if (value := message.get(name)) is not None
    }


def _content(parts: list[_Part]) -> str | list[dict[str, str]]:
    """Return the parts of a message as text, or as parts without the content of images."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts if part["type"] == "text")
    return [
        {"type": "text", "text": part["text"]} if part["type"] == "text" else {"type": "image"}
        for part in parts
    ]


def _images(
    messages: Sequence[_Message],
) -> tuple[tuple[ImageFile, ...], tuple[RemoteImage, ...]]:
    """Return the images of a conversation, in order, and those that are to be fetched.

    Raises:
        APIError: one is neither in a data URI nor at a URL.
    """
    images, remote = list[ImageFile](), list[RemoteImage]()
    for place, message in enumerate(messages):
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if part["type"] != "image_url":
                continue
            url, path = part["image_url"]["url"], f"messages[{place}].content[{number}].image_url"
            if url.startswith(("http://", "https://")):
                remote.append(RemoteImage(url, len(images), f"{path}.url"))
                images.append(b"")
                continue
            try:
                images.append(read_image(url))
            except ValueError as error:
                raise APIError(400, f"{path}.url: {error}", param=f"{path}.url") from error
    return tuple(images), tuple(remote)


class _SamplingFields(BaseModel):
    """Fields of `records.Sampling`, by its names."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=1e-6, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_TOP_K)
    min_p: float | None = Field(None, ge=0, le=1)
    min_new_tokens: int | None = Field(None, ge=0, alias="min_tokens")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)


class _Body(_SamplingFields):
    """Fields of both kinds of requests."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str
    n: int = Field(1, ge=1)
    stop: Annotated[
        list[NonEmpty],
        Field(max_length=MAX_STOPS, fail_fast=True),
        _Several,
        expected(f"be a string or a list of at most {MAX_STOPS}, none of them empty"),
    ] = []
    stop_token_ids: Annotated[list[_Token], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] = []
    logit_bias: Annotated[dict[str, Any], only({})] = {}
    stream: bool = False
    stream_options: _StreamOptions = {}
    seed: int | None = None
    return_token_ids: bool = False
    response_format: Annotated[
        ResponseFormat,
        expected(
            "be an object of type text, json_object or json_schema, the last one with a schema in "
            "json_schema.schema"
        ),
    ] = {"type": "text"}
    structured_outputs: StructuredOutputs = {}
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _given(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Drop nulls, which mean that a field is not given, and fields without effect."""
        return without_ignored(given, cls, IGNORED)

    def generation_params(
        self, max_new_tokens: int | None, num_top_logprobs: int | None
    ) -> GenerationParams:
        """Return the generation parameters; without top logprobs there are no log-probs."""
        sampling = self.model_dump(include=set(_SamplingFields.model_fields), exclude_none=True)
        if num_top_logprobs:
            sampling["num_top_logprobs"] = num_top_logprobs
        return GenerationParams(
            model=self.model,
            num_samples=self.n,
            max_new_tokens=max_new_tokens,
            stream=self.stream,
            include_usage=bool(self.stream_options.get("include_usage")),
            stops=tuple(self.stop),
            seed=self.seed,
            sampling=sampling,
            stop_tokens=tuple(self.stop_token_ids),
            include_logp=num_top_logprobs is not None,
            include_tokens=self.return_token_ids,
            format=read_format(
                self.response_format,
                self.structured_outputs,
                self.model_dump(include=set(GUIDED), exclude_none=True),
            ),
        )


class _ChatBody(_Body):
    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["", "none", "minimal", "low", "medium", "high", "xhigh", "max"] = ""
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)


class _TextsBody(_Body):
    prompt: Annotated[
        list[NonEmpty | _Tokens],
        Field(min_length=1, fail_fast=True),
        _Several,
        expected("be a string, token ids, or a list of either, none of them empty"),
    ]
    echo: bool = False
    suffix: Annotated[str, only("")] = ""
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    max_tokens: int = Field(16, ge=0)
    best_of: int | None = None


class _TokensBody(BaseModel):
    """Other fields, such as a request id or a priority, have no effect."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str
    token_ids: _Tokens
    sampling_params: dict[str, Any] = {}
    stream: Annotated[bool | None, only(False)] = False


class _ClassifyBody(BaseModel):
    """A conversation to be scored, as in vLLM's /classify."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    use_activation: bool = True
    add_generation_prompt: Annotated[bool, only(False)] = False


class TokenizeBody(BaseModel):
    """A text to be encoded, with the tokens that tokenizer.json adds by default."""

    model_config = ConfigDict(strict=True)

    prompt: str
    add_special_tokens: bool = True


class DetokenizeBody(BaseModel):
    """Token ids to be decoded."""

    model_config = ConfigDict(strict=True)

    tokens: Annotated[list[_Token], Field(fail_fast=True)]
