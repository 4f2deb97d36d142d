"""What the server needs to know."""

from __future__ import annotations

from typing import Literal

import chz

from areal_jax.bounds import NOT_NEGATIVE, POSITIVE, at_most
from areal_jax.data.config import RemoteImagesConfig
from areal_jax.engine.config import EngineConfig


@chz.chz
class LimitsConfig:
    """What clients may ask for, and how long they may take."""

    max_body_bytes: int = chz.field(
        validator=POSITIVE, default=4 << 20, doc="a larger request is refused (413)"
    )
    max_body_values: int = chz.field(
        validator=POSITIVE,
        default=200_000,
        doc=(
            "commas and opening brackets in a request; one with more is refused before it is "
            "parsed (413)"
        ),
    )
    max_messages: int = chz.field(
        validator=POSITIVE,
        default=2048,
        doc="messages of a conversation; a longer one is refused (400)",
    )
    max_connections: int = chz.field(
        validator=POSITIVE,
        default=1024,
        doc="open connections; one more is answered with 503 and closed",
    )
    max_requests: int = chz.field(
        validator=POSITIVE,
        default=256,
        doc="requests answered at the same time; one more is refused (429)",
    )
    max_samples: int = chz.field(
        validator=POSITIVE,
        default=128,
        doc="answers that one request may ask for, n times its prompts (400)",
    )
    request_timeout_s: float = chz.field(
        validator=POSITIVE,
        default=600.0,
        doc="an answer that is not sent by then is broken off (504)",
    )
    body_timeout_s: float = chz.field(
        validator=POSITIVE,
        default=30.0,
        doc=(
            "a request that has not arrived by then is refused (408), and a connection without "
            "one is closed"
        ),
    )
    shutdown_timeout_s: float = chz.field(
        validator=POSITIVE,
        default=10.0,
        doc="time for in-flight requests to finish at shutdown, in seconds",
    )


@chz.chz
class ServeConfig:
    model: str = chz.field(
        default="embedded",
        doc="'embedded' or 'embedded_vision' (tiny policies inside the package), a "
        "Hugging Face folder, a hub name, "
        "a run folder (its newest checkpoint), RUN/checkpoints/VERSION, or a PEFT folder",
    )
    base: str | None = chz.field(
        default=None,
        doc=(
            "where `model` is a PEFT folder, the policy that its adapter belongs to; none: the "
            "one it names"
        ),
    )
    served_name: str | None = chz.field(
        default=None, doc="what clients call the model; none: the same as `model`"
    )
    host: str = chz.field(
        default="127.0.0.1", doc="address to listen at; 0.0.0.0: every one of this machine's"
    )
    port: int = chz.field(
        validator=at_most(65535), default=8000, doc="port to listen at; 0: any that is free"
    )
    api_key: str | None = chz.field(
        default=None, doc="bearer token that clients must show; none: one is made up and printed"
    )
    seed: int = chz.field(
        validator=NOT_NEGATIVE, default=0, doc="of answers to requests that bring none"
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = chz.field(
        default="auto",
        doc="dtype of weights and activations; auto: float32 on CPU, bfloat16 elsewhere",
    )
    engine: EngineConfig = chz.field(
        default_factory=lambda: EngineConfig(
            num_slots=16, max_prompt_tokens=512, max_new_tokens=512
        ),
        doc="decoding; temperature, top_k and top_p of requests that say nothing of them",
    )
    devices: int | None = chz.field(
        validator=POSITIVE, default=None, doc="devices that decode; none: all"
    )
    tensor: int = chz.field(
        validator=POSITIVE,
        default=1,
        doc="shards of heads, MLP and vocabulary; the rest of the devices shards the slots",
    )
    simulated_devices: int | None = chz.field(
        validator=POSITIVE, default=None, doc="CPU only: pretend to have this many devices"
    )
    limits: LimitsConfig = chz.field(default_factory=LimitsConfig, doc="what clients may ask for")
    images: RemoteImagesConfig = chz.field(
        default_factory=RemoteImagesConfig, doc="images that requests name by their URL"
    )
