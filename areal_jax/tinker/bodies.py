"""JSON bodies of Tinker's API. Unknown fields are ignored: clients of other releases send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from areal_jax.errors import InvalidRequest

Id = Annotated[str, Field(min_length=1, max_length=300)]
Number = Annotated[int, Field(ge=0, lt=1 << 62)]
Ttl = Annotated[int, Field(ge=1, le=10 * 365 * 86400)]
"""Seconds until something expires."""
Token = Annotated[int, Field(ge=0, lt=1 << 31)]


class Body(BaseModel):
    model_config = ConfigDict(protected_namespaces=(), extra="ignore")


class CreateSession(Body):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""


class SessionHeartbeat(Body):
    session_id: Id


class LoraConfig(Body):
    rank: int = 32
    seed: Number | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Body):
    type: str = "adamw"


class CreateModel(Body):
    session_id: Id
    model_seq_id: Number
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    user_metadata: dict[str, Any] | None = None


class ModelBody(Body):
    model_id: Id


class OptimStep(Body):
    model_id: Id
    seq_id: Number
    adam_params: dict[str, float] | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(Body):
    model_id: Id
    seq_id: Number
    path: str | None = None
    overwrite: bool = False
    ttl_seconds: Ttl | None = None
    user_metadata: dict[str, Any] | None = None


class SaveWeightsForSampler(Body):
    model_id: Id
    seq_id: Number
    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl | None = None
    user_metadata: dict[str, Any] | None = None


class LoadWeights(Body):
    model_id: Id | None = None
    seq_id: Number | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    path: str
    optimizer: bool = False
    user_metadata: dict[str, Any] | None = None


class CreateSamplingSession(Body):
    session_id: Id
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class PromptChunk(Body):
    type: str = "encoded_text"
    tokens: list[Token] = []


class Prompt(Body):
    chunks: list[PromptChunk]


class SamplingParams(Body):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: str | list[str] | list[Token] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """An extension of this server."""


class Sample(Body):
    sampling_session_id: Id
    seq_id: Number
    prompt: Prompt
    num_samples: Annotated[int, Field(ge=1)] = 1
    sampling_params: SamplingParams = SamplingParams()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0

    def num_tokens(self, longest: int) -> int:
        """Return the tokens that it may need: of the prompt, and of samples as long as they may be,
        or else of the longest answers.
        """
        prompt = sum(len(chunk.tokens) for chunk in self.prompt.chunks)
        return prompt + self.num_samples * (self.sampling_params.max_tokens or longest)


class RetrieveFuture(Body):
    request_id: Id


class CheckpointTtl(Body):
    ttl_seconds: Ttl | None


class WeightsInfo(Body):
    tinker_path: str


OWNED = {
    *("session_id", "model_id", "sampling_session_id", "request_id"),
    *("path", "model_path", "tinker_path"),
}
"""Fields with the id or the path of what a tenant owns. `path` may also be the name of a new
checkpoint, which is no session's."""

B = TypeVar("B", bound=Body)


def read_body(kind: type[B], given: Mapping[str, Any]) -> B:
    """Validate a body.

    Raises:
        InvalidRequest: with the first field that is invalid.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise InvalidRequest(f"{where}: {first['msg']}"[:500]) from None
