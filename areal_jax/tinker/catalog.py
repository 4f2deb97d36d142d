"""What a server has: its policy, training runs and checkpoints, as clients list them."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.tinker import bodies
from areal_jax.tinker.config import TinkerConfig
from areal_jax.tinker.journal import CheckpointRow, Journal, ModelRow
from areal_jax.tinker.tenants import SCHEME, Tenant, Tenants, Unknown
from areal_jax.tinker.training_queue import TrainingQueue


class ServedPolicy(NamedTuple):
    """The policy that clients train."""

    name: str
    names: frozenset[str]
    """Other names that clients may give."""
    tokenizer: HFTokenizer
    tokenizer_id: str
    """Where clients load the tokenizer from."""


class Catalog:
    """Lists what is stored. Used by the event loop only."""

    def __init__(
        self,
        config: TinkerConfig,
        policy: ServedPolicy,
        journal: Journal,
        queue: TrainingQueue,
        tenants: Tenants,
    ) -> None:
        self._config, self._policy, self._journal, self._queue = config, policy, journal, queue
        self._tenants = tenants
        self.last_request_s = dict[str, float]()
        """Time of the last operation of each model."""

    def capabilities(self) -> dict[str, Any]:
        engine = self._config.engine
        model = {
            "model_name": self._policy.name,
            "max_context_length": min(self._config.max_tokens, engine.max_tokens),
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    def training_runs(self, tenant: Tenant, limit: int, offset: int) -> dict[str, Any]:
        """List the training runs of a tenant."""
        of = self._tenants.name_of
        rows = [row for row in self._journal.models() if of(row.id) == tenant.name]
        return {
            "training_runs": [self._training_run(row) for row in rows[offset : offset + limit]],
            "cursor": {"offset": offset, "limit": limit, "total_count": len(rows)},
        }

    def training_run(self, model: str) -> dict[str, Any]:
        row = next((row for row in self._journal.models() if row.id == model), None)
        if row is None:
            raise Unknown(f"{model[:200]!r}: there is no such training run")
        return self._training_run(row)

    def _training_run(self, row: ModelRow) -> dict[str, Any]:
        given = row.fields.get("lora")
        last = {each["checkpoint_type"]: each for each in self._checkpoints_of(row.id)}
        return {
            "training_run_id": row.id,
            "base_model": self._policy.name,
            "model_owner": "local",
            "is_lora": given is not None,
            "lora_rank": given and given["rank"],
            "last_request_time": _time(self.last_request_s.get(row.id, row.created)),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": row.fields.get("user_metadata"),
        }

    def checkpoints(self, model: str) -> dict[str, Any]:
        self.training_run(model)
        return {"checkpoints": self._checkpoints_of(model)}

    def all_checkpoints(self, tenant: Tenant, limit: int, offset: int) -> dict[str, Any]:
        """List the checkpoints of a tenant."""
        of = self._tenants.name_of
        rows = [row for row in self._listed() if of(row.model) == tenant.name]
        return {
            "checkpoints": [_checkpoint(row) for row in rows[offset : offset + limit]],
            "cursor": {"offset": offset, "limit": limit, "total_count": len(rows)},
        }

    def _checkpoints_of(self, model: str) -> list[dict[str, Any]]:
        return [_checkpoint(row) for row in self._listed() if row.model == model]

    def _listed(self) -> list[CheckpointRow]:
        """List the checkpoints that clients have named."""
        return [row for row in self._queue.checkpoints.values() if "/." not in row.path]

    def delete_checkpoint(self, model: str, checkpoint: str) -> None:
        self._queue.delete_checkpoint(f"{SCHEME}{model}/{checkpoint}")

    def set_checkpoint_ttl(self, model: str, checkpoint: str, ttl_s: int | None) -> None:
        self._queue.set_checkpoint_ttl(f"{SCHEME}{model}/{checkpoint}", ttl_s)

    def weights_info(self, body: bodies.WeightsInfo) -> dict[str, Any]:
        self._queue.folder_of(body.tinker_path)
        shape = self._queue.shape_of(body.tinker_path)
        targets = () if shape is None else shape.targets
        return {
            "base_model": self._policy.name,
            "is_lora": shape is not None,
            "lora_rank": shape and shape.rank,
            "train_unembed": False,
            "train_attn": "o_proj" in targets or "kv_b_proj" in targets,
            "train_mlp": "down_proj" in targets,
        }


def _checkpoint(row: CheckpointRow) -> dict[str, Any]:
    expires = row.fields.get("expires")
    return {
        "checkpoint_id": row.path.removeprefix(f"{SCHEME}{row.model}/"),
        "checkpoint_type": row.kind,
        "time": _time(row.created),
        "tinker_path": row.path,
        "size_bytes": row.size,
        "public": False,
        "user_metadata": row.fields.get("user_metadata"),
        "expires_at": expires and _time(expires),
    }


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
