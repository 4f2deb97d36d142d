"""Settings of the Tinker-compatible training server."""

from __future__ import annotations

from typing import Literal

import chz

from areal_jax.bounds import NOT_NEGATIVE, POSITIVE, at_most
from areal_jax.engine.config import EngineConfig
from areal_jax.models.config import Remat

KEY_PREFIX = "tml-"
"""Start of every key: the client refuses others."""


@chz.chz
class TinkerLimits:
    """Limits of requests, tenants and stored data."""

    max_body_bytes: int = chz.field(
        validator=POSITIVE,
        default=64 << 20,
        doc="size of a request, in bytes; a larger one is refused (413)",
    )
    max_json_bytes: int = chz.field(
        validator=POSITIVE,
        default=4 << 20,
        doc="size of a JSON request, in bytes; a larger one is refused (413)",
    )
    max_datums: int = chz.field(
        validator=POSITIVE,
        default=1024,
        doc="datums of one forward_backward; the client splits larger batches",
    )
    max_connections: int = chz.field(
        validator=POSITIVE,
        default=1024,
        doc="open connections; one more is answered with 503 and closed",
    )
    max_queued_operations: int = chz.field(
        validator=POSITIVE,
        default=64,
        doc="unfinished training operations of a model; one more is refused (429)",
    )
    max_queued_samples: int = chz.field(
        validator=POSITIVE,
        default=4096,
        doc="unfinished sampling requests of a session; one more is refused (429)",
    )
    max_resamples: int = chz.field(
        validator=NOT_NEGATIVE,
        default=3,
        doc="tries to sample again what is older than a request's max_staleness; then it fails",
    )
    max_samples: int = chz.field(
        validator=POSITIVE, default=128, doc="num_samples of a sampling request"
    )
    max_models: int = chz.field(
        validator=POSITIVE,
        default=32,
        doc="models of all sessions that are not unloaded; one more is refused (429)",
    )
    max_models_of_session: int = chz.field(
        validator=POSITIVE,
        default=16,
        doc="models of a session that are not unloaded; one more is refused (429)",
    )
    max_resident_models: int = chz.field(
        validator=POSITIVE,
        default=4,
        doc="models whose adapter and optimizer state are in device memory; the least recently "
        "used one moves to the host",
    )
    max_batched_models: int = chz.field(
        validator=POSITIVE,
        default=4,
        doc="adapters in one batch of forward_backward; each program has room for so many beside "
        "each other",
    )
    max_engines: int = chz.field(
        validator=POSITIVE,
        default=2,
        doc="decode engines, each with a KV cache and adapters of one bucket of ranks (8, 16, 32, "
        "...); adapters of further buckets wait",
    )
    max_adapters: int = chz.field(
        validator=POSITIVE,
        default=8,
        doc="adapters in the memory of a decode engine, which samples from all of them in one "
        "batch; further adapters wait",
    )
    max_rank: int = chz.field(validator=POSITIVE, default=128, doc="largest rank of an adapter")
    max_losses: int = chz.field(
        validator=POSITIVE,
        default=16,
        doc="loss functions with their settings that are compiled at the same time",
    )
    num_unnamed_samplers: int = chz.field(
        validator=POSITIVE,
        default=16,
        doc="newest sampler weights without a name that are kept of a model; older ones expire",
    )
    hold_s: float = chz.field(
        validator=POSITIVE,
        default=20.0,
        doc="time that retrieve_future waits for a result, in seconds; the client allows 45",
    )
    idle_timeout_s: float = chz.field(
        validator=POSITIVE,
        default=300.0,
        doc="time without use, in seconds, after which a model moves to the host and a decode "
        "engine ends; the next request brings either back",
    )
    session_timeout_s: float = chz.field(
        validator=POSITIVE,
        default=600.0,
        doc="time without heartbeat, in seconds, after which a session and its models end",
    )
    result_ttl_s: float = chz.field(
        validator=POSITIVE,
        default=3600.0,
        doc="time that results can be retrieved again, in seconds",
    )
    snapshot_period_s: float = chz.field(
        validator=NOT_NEGATIVE,
        default=30.0,
        doc="least time between two snapshots of a model, in seconds; after a crash, operations "
        "since its snapshot are computed again",
    )
    body_timeout_s: float = chz.field(
        validator=POSITIVE,
        default=60.0,
        doc="time for a request to arrive, in seconds, and for an idle connection",
    )
    shutdown_timeout_s: float = chz.field(
        validator=POSITIVE, default=5.0, doc="time for open requests at shutdown, in seconds"
    )


@chz.chz
class TenantQuota:
    """What one tenant, whom a key names, may use at the same time."""

    max_sessions: int = chz.field(
        validator=POSITIVE, default=64, doc="open sessions; one more is refused (429)"
    )
    max_models: int = chz.field(
        validator=POSITIVE,
        default=32,
        doc="models that are not unloaded; one more is refused (429)",
    )
    max_requests: int = chz.field(
        validator=POSITIVE,
        default=16384,
        doc="unfinished training operations and sampling requests; one more is refused (429)",
    )
    max_tokens: int = chz.field(
        validator=POSITIVE,
        default=64 << 20,
        doc="tokens of unfinished requests: those of datums, and of prompts with num_samples x "
        "max_tokens; a request beyond is refused (429)",
    )


@chz.chz
class TinkerConfig:
    """A server on which clients of Tinker's API train LoRA adapters of one frozen policy."""

    model: str = chz.field(
        default="embedded",
        doc="'embedded' or 'embedded_vision' (tiny policies inside the package), a "
        "Hugging Face folder or a hub name",
    )
    served_name: str | None = chz.field(
        default=None,
        doc="name that clients give as base_model, besides `model`; none: the hub name or the "
        "folder of the policy, from which clients can load the tokenizer",
    )
    run_folder: str = chz.field(
        default="runs/tinker",
        doc="folder of checkpoints, snapshots and the journal; a server resumes from it",
    )
    host: str = chz.field(
        default="127.0.0.1", doc="address to listen at; 0.0.0.0: every one of this machine's"
    )
    port: int = chz.field(
        validator=at_most(65535), default=8000, doc="port to listen at; 0: any that is free"
    )
    api_key: str | None = chz.field(
        default=None,
        doc=f"key that clients send, which starts with {KEY_PREFIX}; none: one is generated, "
        "stored in the run folder and printed",
    )
    tenants: str | None = chz.field(
        default=None,
        doc="TOML file with a table for each tenant: its api_key, and quotas that differ from "
        "`quota`; none: api_key is the only key",
    )
    quota: TenantQuota = chz.field(
        default_factory=TenantQuota, doc="what each tenant may use at the same time"
    )
    lora: bool = chz.field(
        default=True,
        doc="train adapters; false: one client at a time trains all parameters",
    )
    alpha: float = chz.field(
        validator=POSITIVE, default=32.0, doc="scale of adapters: alpha / rank, as in Tinker"
    )
    seed: int = chz.field(
        validator=NOT_NEGATIVE, default=0, doc="seed of requests and adapters without one"
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = chz.field(
        default="auto",
        doc="dtype of weights and activations; auto: float32 on CPU, bfloat16 elsewhere",
    )
    max_tokens: int = chz.field(
        validator=POSITIVE, default=1024, doc="longest datum of forward_backward, in tokens"
    )
    micro_batch_tokens: int = chz.field(
        validator=POSITIVE,
        default=512,
        doc="tokens of a micro-batch on each shard of the batch; a longer datum has one by itself",
    )
    remat: Remat = chz.field(
        default="full",
        doc="activations that the backward pass recomputes: none, dots, attention or full",
    )
    logp_chunk_tokens: int = chz.field(
        validator=POSITIVE,
        default=1024,
        doc="tokens whose logits exist at the same time, per shard",
    )
    engine: EngineConfig = chz.field(
        default_factory=lambda: EngineConfig(
            num_slots=16,
            max_prompt_tokens=512,
            max_new_tokens=512,
            batch_invariant="equal_views",
            admission_wait_s=0.01,
        ),
        doc="decoding; temperature, top_k and top_p come from requests",
    )
    devices: int | None = chz.field(
        validator=POSITIVE, default=None, doc="number of devices; none: all"
    )
    tensor: int = chz.field(
        validator=POSITIVE,
        default=1,
        doc="shards of heads, MLP and vocabulary; the rest of the devices shards rows and slots",
    )
    simulated_devices: int | None = chz.field(
        validator=POSITIVE, default=None, doc="number of simulated devices, on CPU only"
    )
    limits: TinkerLimits = chz.field(
        default_factory=TinkerLimits, doc="limits of requests, tenants and stored data"
    )
