"""What differs between families reaches the cache: windows, and experts cut over the rollout
mesh."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decode import CONFIG, LATENT_ATTENTION, forward_logprobs
from tiny_runs import TINY_SIZES

from areal_jax.engine.batch import SLOT, PrefillChunk, empty_slots
from areal_jax.engine.decode import DecodeEngine
from areal_jax.models import lora
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.config import LoRA
from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes

WINDOW = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 8,
    "use_sliding_window": True,
    "sliding_window": 5,
    "max_window_layers": 1,
}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}


LATENT = LATENT_ATTENTION | {"num_key_value_heads": 4}


OF_EXPERTS = LoRA(
    rank=4, alpha=8.0, targets=("experts.gate_proj", "experts.up_proj", "experts.down_proj")
)


@pytest.mark.parametrize(
    ("family", "tensor", "adapter"),
    [
        (WINDOW, 1, None),
        (EXPERTS, 2, None),
        (LATENT, 2, None),
        (EXPERTS, 2, OF_EXPERTS),
        # And of the MLPs beside them: a shared one, and that of the first layer.
        (LATENT, 2, LoRA(rank=4, targets=("gate_proj", "down_proj", *OF_EXPERTS.targets))),
    ],
    ids=["window", "experts", "latent", "experts with adapters", "latent with adapters"],
)
@pytest.mark.slow
def test_sampled_logp_matches_a_full_forward(
    family: dict[str, object], tensor: int, adapter: LoRA | None
) -> None:
    policy = Policy(ModelConfig.from_hf(TINY_SIZES | family, source="a test"), adapter)
    rng = np.random.default_rng(0)
    params, factors = (
        jax.tree.map(
            lambda leaf: np.asarray(
                3 * rng.normal(size=leaf.shape) / leaf.shape[-1] ** 0.5, leaf.dtype
            ),
            shapes,
        )
        for shapes in (policy.abstract(), lora.abstract(policy) if adapter else {})
    )
    placement = PlacementConfig(rollout_devices=tensor, train_devices=1, rollout_tensor=tensor)
    engine = DecodeEngine(
        policy, make_meshes(placement, jax.devices()[: tensor + 1]).rollout, CONFIG, jnp.float32
    )
    weights = jax.jit(engine.layout, out_shardings=engine.base_shardings)(params)
    if adapter:
        arrived = jax.jit(engine.layout, out_shardings=engine.param_shardings)(factors)
        weights = lora.attach(policy, weights, arrived)
        # The trainer's, of another form: merged.
        params = jax.device_put(lora.merge(policy, params, factors))

    # One prompt shorter than the window, and one longer.
    sequences = [rng.integers(0, 64, length).astype(np.int32) for length in (3, 11)]
    state, slots = engine.init_state(), empty_slots(CONFIG.num_slots)
    # Two pages for each: of the prompt, and for the 12 tokens to be sampled.
    table = np.arange(2 * CONFIG.num_slots, dtype=np.int32).reshape(-1, 2)
    state = engine.point(state, table)
    state = engine.prefill(
        weights,
        state,
        [PrefillChunk(sequence[:-1], 0, table[i]) for i, sequence in enumerate(sequences)],
    )
    state = engine.insert(state, {i: len(sequence) - 1 for i, sequence in enumerate(sequences)})
    for slot, sequence in enumerate(sequences):
        record = np.zeros((), SLOT)
        record["token"], record["position"], record["remaining"] = (
            sequence[-1],
            len(sequence) - 1,
            12,
        )
        record["active"] = record["temperature"] = record["top_p"] = 1
        record["stop_tokens"] = -1
        slots[slot] = record
    state, logp = engine.assign_slot(state, slots), []
    for _ in range(
        3
    ):  # dispatches of four steps: what the window sees lies in more than one of them
        state, packed = engine.generate(weights, state)
        sampled = engine.fetch(packed)
        sequences = [
            np.concatenate([sequence, sampled.tokens[:, slot]])
            for slot, sequence in enumerate(sequences)
        ]
        logp.append(sampled.logp[:, :2])

    padded = np.zeros((2, len(sequences[1])), np.int32)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    of_trainer = np.asarray(forward_logprobs(params, padded, np.float32(1.0), policy=policy))
    for sequence, of_engine, row in zip(sequences, np.concatenate(logp).T, of_trainer, strict=True):
        own = row[: len(sequence)]
        np.testing.assert_allclose(of_engine, own[-12:], atol=1e-4)


def test_latent_pages_hold_one_vector_per_token() -> None:
    policy = Policy(ModelConfig.from_hf(TINY_SIZES | LATENT, source="a test"))
    mesh = make_meshes(PlacementConfig(), jax.devices()[:1]).rollout
    pages = DecodeEngine(policy, mesh, CONFIG, jnp.float32).shapes.pages()
    # Latent of 8 and rotated key of 4, instead of keys of 12 and values of 6 in 4 heads.
    sizes = [leaf.size // math.prod(pages[0].keys.shape[1:3]) for leaf in jax.tree.leaves(pages)]
    assert sizes == [12, 12] and policy.config.cached_per_token == 24


def test_a_router_stays_float32_in_an_engine_of_bfloat16() -> None:
    policy = Policy(ModelConfig.from_hf(TINY_SIZES | EXPERTS, source="a test"))
    engine = DecodeEngine(
        policy, make_meshes(PlacementConfig(), jax.devices()[:1]).rollout, CONFIG, jnp.bfloat16
    )
    layer = jax.eval_shape(engine.layout, policy.abstract())["layers"][0]["mlp"]
    assert {name: leaf.dtype.name for name, leaf in layer.items()} == {
        "router": "float32",
        "expert_gate": "bfloat16",
        "expert_up": "bfloat16",
        "expert_down": "bfloat16",
    }
