"""The draft policy of an engine, found and checked against the policy."""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import DTypeLike

from areal_jax.data.policy_files import resolve_policy_folder
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.drafts import DraftPolicy
from areal_jax.models import hf
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.config import PolicyConfig
from areal_jax.models.decoder import Params, Policy


def find_draft_policy(
    engine: EngineConfig,
    config: PolicyConfig,
    tokenizer: HFTokenizer,
    dtype: DTypeLike,
    setting: str = "policy.path",
) -> DraftPolicy | None:
    """Find the policy of `engine.draft_policy`; None if it is empty.

    Args:
        engine: Settings of the engine.
        config: Settings of the policy.
        tokenizer: Tokenizer of the policy.
        dtype: Data type of the draft policy's matrices.
        setting: Setting that names the policy, for messages.

    Raises:
        FileNotFoundError: There is no such policy.
        ValueError: It has other tokens than the policy.
    """
    if not engine.draft_policy:
        return None
    folder = resolve_policy_folder(engine.draft_policy, "engine.draft_policy")
    ignored = config.ignore_config_keys
    if difference := tokenizer.describe_difference(HFTokenizer.from_folder(folder, ignored)):
        raise ValueError(
            f"engine.draft_policy={engine.draft_policy} has other tokens than "
            f"{setting}={config.path}: {difference}; name a policy with the same tokenizer"
        )
    policy = Policy(hf.read_config(folder, ignored, long_rope=config.long_rope))
    return DraftPolicy(policy, lambda placed: hf.load(folder, policy, placed, dtype=dtype))


def random_draft_policy(model: ModelConfig, dtype: DTypeLike) -> DraftPolicy:
    """Return a draft policy of a shape, with random weights."""
    policy = Policy(model)
    shapes = policy.abstract(dtype)

    def load(placed: Any) -> Params:
        def init() -> Params:
            params = policy.init(jax.random.key(0))
            return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, shapes)

        return jax.jit(init, out_shardings=placed)()

    return DraftPolicy(policy, load)
