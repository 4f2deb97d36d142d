"""Responses as JSON objects of OpenAI's protocol, complete or streamed.

With return_token_ids, in addition to the fields of OpenAI: `prompt_token_ids` (a list of lists for
several prompts), and `token_ids`, `versions` and `token_logprobs` of each choice, one entry for
each token, stop tokens too. `constrained` beside log-probs says that they are of the tokens that
the answer's format allows.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from jaxtyping import Int32

from areal_jax.data.tool_calls import ToolCall
from areal_jax.records import Completion, StopReason
from areal_jax.serve.bodies import GenerationParams
from areal_jax.serve.validation import APIError

TokenText = Callable[[int], str]

_SLICE = 16
"""Elements of a list that are written at once: a single call would hold the interpreter's lock for
all of it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Text and tokens of one choice: all of it, or the new part."""

    index: int
    text: str
    sampled: Completion
    """The tokens of this part."""
    finish: StopReason | None = None
    calls: tuple[ToolCall, ...] = ()
    stop_string: str | None = None
    """The stop string that ended it."""
    prompt: Completion | None = None
    """The prompt with its log-probs, where the answer begins with both."""


class Form(Protocol):
    """Writes the answers to one request in the format of a protocol.

    An event of a stream with a `type` is sent by that name.
    """

    @property
    def done(self) -> bytes:
        """What a stream ends with after its last event."""
        ...

    def whole(self, parts: Sequence[Part]) -> str:
        """Return the complete response as JSON."""
        ...

    def opening(self) -> list[dict[str, Any]]:
        """Return the first events of a stream."""
        ...

    def chunk(self, part: Part) -> list[dict[str, Any]]:
        """Return the events of a part of a stream."""
        ...

    def closing(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Return the last events of a stream.

        Args:
            parts: the complete choices.
        """
        ...

    def failure(self, refused: APIError) -> dict[str, Any]:
        """Return the event of a stream that fails."""
        ...


MakeForm: TypeAlias = Callable[
    [str, GenerationParams, Sequence[Int32[np.ndarray, "_"]], TokenText, int], Form
]
"""Makes the form of a request's answers from the number of the request, its parameters, prompts,
the text of single tokens, and the time in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """The answers to a request for /v1/chat/completions, /v1/completions or
    /inference/v1/generate.
    """

    kind: Literal["chat", "text", "tokens"]
    number: str
    """Names the request."""
    generation_params: GenerationParams
    prompts: Sequence[Int32[np.ndarray, "_"]]
    token_text: TokenText
    created: int
    done: bytes = b"data: [DONE]\n\n"
    _reported: Counter[int] = field(default_factory=Counter)
    """Characters of the tokens of each choice whose log-probs were sent."""

    def whole(self, parts: Sequence[Part]) -> str:
        """Write choice by choice: the objects of all take ten times the memory."""
        if self.kind == "tokens":
            return self._in_tokens(parts)
        kind = "chat.completion" if self.kind == "chat" else "text_completion"
        choices = ", ".join([written(self._choice(part, "message")) for part in parts])
        before, after = self._frame(kind) | self._prompts(), {"usage": self._usage(parts)}
        return f'{written(before)[:-1]}, "choices": [{choices}], {written(after)[1:]}'

    def opening(self) -> list[dict[str, Any]]:
        """Return the first chunks of a stream, with the role."""
        if self.kind == "text":
            return (
                [self._chunk([]) | self._prompts()] if self.generation_params.include_tokens else []
            )
        choices = [
            _delta(index, {"role": "assistant", "content": ""})
            for index in range(self.generation_params.num_samples)
        ]
        return [self._chunk(choices) | self._prompts()]

    def chunk(self, part: Part) -> list[dict[str, Any]]:
        return [self._chunk([self._choice(part, "delta")])]

    def closing(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Return the token counts, where they are asked for."""
        return (
            [self._chunk([]) | {"usage": self._usage(parts)}]
            if self.generation_params.include_usage
            else []
        )

    def failure(self, refused: APIError) -> dict[str, Any]:
        return refused.body()

    def _in_tokens(self, parts: Sequence[Part]) -> str:
        """Return the answer without text, as vLLM's /inference/v1/generate writes it, as JSON."""
        choices = [
            {
                "index": part.index,
                "token_ids": part.sampled.tokens.tolist(),
                "finish_reason": part.finish,
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": logp, "top_logprobs": []}
                        for token, logp, _ in with_top_logprobs(part.sampled)
                    ]
                },
                "versions": part.sampled.versions.tolist(),
            }
            for part in parts
        ]
        frame = {"request_id": self.number, "choices": choices, "usage": self._usage(parts)}
        return written(frame | self._prompts())

    def _usage(self, parts: Sequence[Part]) -> dict[str, int]:
        prompt, sampled = count_tokens(self.prompts, parts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }

    def _frame(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.kind == "chat" else "cmpl"
        return {
            "id": f"{prefix}-{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.generation_params.model,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._frame(
            "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        ) | {"choices": choices}

    def _prompts(self) -> dict[str, Any]:
        if not self.generation_params.include_tokens:
            return {}
        prompts = [prompt.tolist() for prompt in self.prompts]
        return {"prompt_token_ids": prompts[0] if len(prompts) == 1 else prompts}

    def _choice(self, part: Part, name: str) -> dict[str, Any]:
        choice = {"index": part.index, "finish_reason": part.finish, "logprobs": None}
        if self.kind == "text":
            choice["text"] = part.text
        else:
            choice[name] = self._message(part, is_delta=name == "delta")
            if part.calls and part.finish == "stop":
                choice["finish_reason"] = "tool_calls"
        sampled = part.sampled
        if self.generation_params.include_logp:
            choice["logprobs"] = (
                self._chat_logp(sampled) if self.kind == "chat" else self._text_logp(part)
            )
        if self.generation_params.include_tokens:
            choice["token_ids"], choice["versions"] = (
                sampled.tokens.tolist(),
                sampled.versions.tolist(),
            )
            choice["token_logprobs"] = sampled.logp.tolist()
            choice |= self._constrained
        return choice

    def _message(self, part: Part, *, is_delta: bool) -> dict[str, Any]:
        message: dict[str, Any] = {} if is_delta else {"role": "assistant", "refusal": None}
        if not is_delta or part.text:
            message["content"] = None if part.calls and not part.text.strip() else part.text
        if part.calls:
            message["tool_calls"] = [
                {
                    **({"index": place} if is_delta else {}),
                    "id": call_id(self.number, part, place),
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(call.arguments, ensure_ascii=False),
                    },
                }
                for place, call in enumerate(part.calls)
            ]
        return message

    @property
    def _constrained(self) -> dict[str, bool]:
        """Return a field beside log-probs that are of the tokens that a format allows."""
        return {"constrained": True} if self.generation_params.is_constrained else {}

    def _chat_logp(self, sampled: Completion) -> dict[str, Any]:
        found = {"content": token_logprobs(self.token_text, sampled), "refusal": None}
        return found | self._constrained

    def _text_logp(self, part: Part) -> dict[str, Any]:
        prompt = [] if part.prompt is None else with_top_logprobs(part.prompt)
        reported = [
            (self.token_text(token), logp, others)
            for token, logp, others in (*prompt, *with_top_logprobs(part.sampled))
        ]
        ends = np.cumsum(
            [self._reported[part.index], *(len(text) for text, _, _ in reported)]
        ).tolist()
        self._reported[part.index] = ends[-1]
        logps: list[float | None] = [logp for _, logp, _ in reported]
        tops: list[dict[str, float] | None] = [
            {self.token_text(token): logp for token, logp in others} for _, _, others in reported
        ]
        if prompt:
            logps[0], tops[0] = None, None  # nothing predicts the first token
        return {
            "tokens": [text for text, _, _ in reported],
            "token_logprobs": logps,
            "top_logprobs": tops,
            "text_offset": ends[:-1],
        } | self._constrained


def count_tokens(
    prompts: Sequence[Int32[np.ndarray, "_"]], parts: Sequence[Part]
) -> tuple[int, int]:
    """Return the number of tokens of the prompts, and of the complete choices."""
    return sum(map(len, prompts)), sum(len(part.sampled.tokens) for part in parts)


def token_logprobs(token_text: TokenText, sampled: Completion) -> list[dict[str, Any]]:
    """Return the log-probs of tokens as OpenAI's API writes them."""

    def of(token: int, logp: float) -> dict[str, Any]:
        text = token_text(token)
        # Part of a character has a place in no text; which bytes it stands for, only the tokenizer
        # knows.
        return {
            "token": text,
            "logprob": logp,
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }

    return [
        of(token, logp) | {"top_logprobs": [of(*other) for other in others]}
        for token, logp, others in with_top_logprobs(sampled)
    ]


def call_id(number: str, part: Part, place: int, prefix: str = "call") -> str:
    """Return the id of a tool call, unique on this server."""
    return f"{prefix}_{number}_{part.index}_{place}"


def with_top_logprobs(sampled: Completion) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """Token, log-prob, and the most likely tokens with theirs, as far as they could be sampled."""
    if sampled.top_logprobs is None:
        others = [[]] * len(sampled.tokens)
    else:
        rows = zip(
            sampled.top_logprobs.tokens.tolist(), sampled.top_logprobs.logp.tolist(), strict=True
        )
        others = [[each for each in zip(*row, strict=True) if each[1] > -np.inf] for row in rows]
    return list(zip(sampled.tokens.tolist(), sampled.logp.tolist(), others, strict=True))


def written(value: Any) -> str:
    """JSON of objects, and of long lists in them, by many short calls."""
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(name)}: {written(each)}" for name, each in value.items())
            + "}"
        )
    if isinstance(value, list) and len(value) > _SLICE:
        slices = (value[start : start + _SLICE] for start in range(0, len(value), _SLICE))
        return "[" + ", ".join(json.dumps(each)[1:-1] for each in slices) + "]"
    return json.dumps(value)


def _delta(index: int, message: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": message, "finish_reason": None, "logprobs": None}


def now() -> int:
    """Seconds since 1970, which answers are stamped with."""
    return int(time.time())
