"""Adapters of experts: equality with merged weights, on meshes too, and PEFT's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_lora import adapted, logits, merged, placed, random_adapter
from test_moe import CHOSEN, DOWN, GATE, UP, WEIGHTS, B, D, E, F, T, X, draw, every_expert
from tiny_policies import host_params, random_params

from areal_jax.models import lora
from areal_jax.models.adapted import Adapted
from areal_jax.models.config import Target
from areal_jax.models.decoder import Params, Policy
from areal_jax.models.moe import local_experts, sharded_experts
from areal_jax.models.quantized import quantize
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_rollout_mesh, make_train_mesh
from areal_jax.parallel.sharding import ROLLOUT_RULES, TRAIN_RULES, put_batch, shardings

EXPERTS: tuple[Target, ...] = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
MLP: tuple[Target, ...] = ("gate_proj", "up_proj", "down_proj")
R, SCALE = 3, 0.75
AXES = {"gate": ("embed", "mlp"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}


@pytest.mark.slow
def test_new_expert_adapter_keeps_the_bits_of_the_base() -> None:
    policy = adapted("Qwen2MoeForCausalLM", targets=(*MLP, *EXPERTS), rank=8)
    base, adapter = (
        random_params(policy),
        jax.jit(lora.init, static_argnums=0)(policy, jax.random.key(0)),
    )
    np.testing.assert_array_equal(
        logits(policy, lora.attach(policy, base, adapter)), logits(policy, base)
    )
    # Uniform within 1 / sqrt(inputs) as one expert's: the width 16 of gate, and 12 of down.
    for name, bound in (("expert_gate", 16**-0.5), ("expert_down", 12**-0.5)):
        a = np.asarray(adapter["layers"]["mlp"][name]["a"])
        assert 0.98 * bound < np.abs(a).max() < bound
        assert a.std() == pytest.approx(bound / 3**0.5, rel=0.1)
        assert (a[:, 0] != a[:, 1]).all()


@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "GptOssForCausalLM"])
@pytest.mark.slow
def test_expert_adapter_gradients_follow_from_merged_weights(architecture: str) -> None:
    targets = (*EXPERTS, *(MLP if architecture.startswith("Qwen2") else ()))
    policy = adapted(architecture, targets=targets)
    base, adapter = random_params(policy), random_adapter(policy)
    weights = jnp.asarray(np.random.default_rng(5).normal(size=(2, 12, 40)) / 100, jnp.float32)

    def loss(params: Params) -> jax.Array:
        return (logits(policy, params, remat="full") * weights).sum()

    ours = jax.jit(jax.grad(lambda adapter: loss(lora.attach(policy, base, adapter))))(adapter)
    of_merged = jax.jit(jax.grad(loss))(merged(policy, base, adapter))["layers"]["mlp"]
    # y = x (W + s A B), s = alpha / rank: dA = s dW Bᵀ and dB = s Aᵀ dW, of each expert.
    trees = [(adapter["layers"]["mlp"], ours["layers"]["mlp"], of_merged)]
    if "shared" in trees[0][0]:
        trees.append(tuple(tree["shared"] for tree in trees[0]))
    for given, found, whole in trees:
        for name in given.keys() - {"shared"}:
            a, b, dw = given[name]["a"], given[name]["b"], whole[name]
            da, db = (5 / 3 * dw @ b.swapaxes(-1, -2), 5 / 3 * a.swapaxes(-1, -2) @ dw)
            np.testing.assert_allclose(found[name]["a"], da, atol=1e-5)
            np.testing.assert_allclose(found[name]["b"], db, atol=1e-5)
            assert np.abs(da).max() > 1e-3 and np.abs(db).max() > 1e-3


def factors() -> dict[str, Any]:
    """Factors of gate, up and down."""
    sizes = {"gate": (D, F), "up": (D, F), "down": (F, D)}
    return {
        name: {"a": draw(E, inputs, R, seed=10 + i), "b": draw(E, R, outputs, seed=20 + i)}
        for i, (name, (inputs, outputs)) in enumerate(sizes.items())
    }


def adapted_experts(experts: Any, matrices: Any, adapter: Any, x: jax.Array, *rest: Any) -> Any:
    """Compute experts whose matrices have adapters."""
    return experts(
        x, *rest, *(Adapted(matrices[n], adapter[n]["a"], adapter[n]["b"], SCALE) for n in AXES)
    )


@jax.jit
def merged_experts(adapter: Any, x: jax.Array, matrices: Any = (GATE, UP, DOWN)) -> jax.Array:
    whole = (
        w + SCALE * adapter[name]["a"] @ adapter[name]["b"]
        for name, w in zip(AXES, matrices, strict=True)
    )
    return every_expert(x, WEIGHTS, CHOSEN, *whole)


def gradients(function: Any, adapter: Any, x: jax.Array) -> Any:
    """Output, and gradients of adapter and inputs."""

    def loss(adapter: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = function(adapter, x)
        return (out * jnp.cos(jnp.arange(D))).sum(), out

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(adapter, x)


@pytest.mark.parametrize(
    ("fsdp", "expert", "tensor"), [(1, 1, 1), (2, 2, 2), (1, 4, 2), (4, 1, 2)], ids=str
)
@pytest.mark.slow
def test_mesh_keeps_output_and_gradients_of_expert_adapters(
    fsdp: int, expert: int, tensor: int
) -> None:
    placement = PlacementConfig(train_fsdp=fsdp, train_expert=expert, train_tensor=tensor)
    mesh = make_train_mesh(placement, jax.devices()[: fsdp * expert * tensor])
    x, weights, chosen = put_batch(mesh, (X, WEIGHTS, CHOSEN), TRAIN_RULES)
    matrices = dict(zip(AXES, (GATE, UP, DOWN), strict=True))
    axes = {name: ("experts", *names) for name, names in AXES.items()}
    matrices = jax.device_put(matrices, shardings(mesh, axes, matrices, TRAIN_RULES))
    of_adapter = {
        name: {"a": ("experts", inputs, "rank"), "b": ("experts", "rank", outputs)}
        for name, (inputs, outputs) in AXES.items()
    }
    adapter = jax.device_put(factors(), shardings(mesh, of_adapter, factors(), TRAIN_RULES))
    shards = {n: adapter["gate"][n].addressable_shards[0].data.shape for n in "ab"}
    assert shards == {
        "a": (E // expert, D // fsdp // (expert if E % expert else 1), R),
        "b": (E // expert, R, F // tensor),
    }
    experts = sharded_experts(mesh, TRAIN_RULES) if mesh.size > 1 else local_experts
    found = gradients(
        lambda adapter, x: adapted_experts(experts, matrices, adapter, x, weights, chosen),
        adapter,
        x,
    )
    expected = gradients(merged_experts, factors(), X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
    (of_adapter, _), _ = expected
    assert min(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(of_adapter)) > 1e-2


@pytest.mark.parametrize("is_quantized", [False, True])
def test_rollout_mesh_shards_expert_adapters_like_experts(is_quantized: bool) -> None:
    matrices: Any = (GATE, UP, DOWN)
    rounded = matrices
    if is_quantized:
        matrices = [quantize(w, range(1, 2), jnp.int8) for w in matrices]
        rounded = [w.values * w.scale for w in matrices]
    mesh = make_rollout_mesh(PlacementConfig(rollout_tensor=4), jax.devices()[:4])
    experts = sharded_experts(mesh, ROLLOUT_RULES)
    whole = dict(zip(AXES, matrices, strict=True))
    out = jax.jit(lambda adapter: adapted_experts(experts, whole, adapter, X, WEIGHTS, CHOSEN))(
        factors()
    )
    assert out.shape == (B, T, D)
    np.testing.assert_allclose(out, merged_experts(factors(), X, rounded), atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "mlp"),
    [
        ("Qwen3MoeForCausalLM", None),
        ("Qwen2MoeForCausalLM", ["mlp.shared_expert.{}_proj.weight"]),
        ("DeepseekV3ForCausalLM", ["mlp.shared_experts.{}_proj.weight", "mlp.{}_proj.weight"]),
        ("GptOssForCausalLM", None),
    ],
)
def test_adapters_of_experts_are_saved_as_target_parameters_of_peft(
    tmp_path: Path, architecture: str, mlp: list[str] | None
) -> None:
    policy = adapted(architecture, targets=("o_proj", *(MLP if mlp else ()), *EXPERTS))
    adapter = random_adapter(policy)
    lora.save(tmp_path, policy, adapter, "base")
    config = json.loads((tmp_path / lora.CONFIG).read_text())
    beside = [name.format(part) for name in mlp or () for part in ("gate", "up", "down")]
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert config["target_modules"] == ["o_proj"]
    assert sorted(config["target_parameters"]) == sorted(experts + beside)
    # gate and up have a rank of their own in the matrix of both.
    assert config["rank_pattern"] == {"experts.gate_up_proj": 6}
    assert config["alpha_pattern"] == {"experts.gate_up_proj": 10.0}

    tensors = load_file(tmp_path / lora.WEIGHTS)
    layer, place = policy.config.moe_layers[-1], len(policy.config.moe_layers) - 1
    name = f"base_model.model.model.layers.{layer}.mlp.experts{{}}.lora_{{}}.weight"
    zeros = jax.tree.map(np.zeros_like, host_params(policy))
    updates = merged(policy, zeros, adapter)["layers"]["mlp"]
    E = len(updates["expert_gate"][place])
    for inner, parts in ((".base_layer", ("gate", "up")), ("", ("down",))):
        # ParamWrapper.get_delta_weight: A is [E, R, I] and B [O, R, E].
        a, b = (tensors[name.format(inner, letter)] for letter in "AB")
        a, b = a.reshape(E, -1, a.shape[-1]), b.reshape(len(b), -1, E)
        found = 5 / 3 * np.einsum("ore,eri->eio", b, a)
        of_parts = [np.asarray(updates[f"expert_{part}"][place]) for part in parts]
        expected = np.concatenate(of_parts, axis=-1)
        if architecture == "GptOssForCausalLM" and inner:
            expected = np.stack(of_parts, axis=-1).reshape(expected.shape)
        np.testing.assert_allclose(found, expected, atol=1e-5)

    read = Policy(policy.config, lora.read_config(tmp_path))
    assert read.lora == policy.lora
    jax.tree.map(np.testing.assert_array_equal, lora.load(tmp_path, read, placed(read)), adapter)
    tensors[name.format(".base_layer", "B")] += 1
    save_file(tensors, tmp_path / lora.WEIGHTS)
    with pytest.raises(ValueError, match=r"block-diagonal, .* experts\.gate_proj"):
        lora.load(tmp_path, read, placed(read))


@pytest.mark.parametrize("written", ["{}", "experts.{}", "mlp.experts.{}"])
@pytest.mark.parametrize(
    ("targets", "parameter"), [(EXPERTS[:2], "gate_up_proj"), (EXPERTS[2:], "down_proj")]
)
def test_adapter_of_one_parameter_of_experts_has_no_inner_wrapper(
    tmp_path: Path, targets: tuple[Target, ...], parameter: str, written: str
) -> None:
    policy = adapted("Qwen3MoeForCausalLM", targets=targets)
    adapter = random_adapter(policy)
    lora.save(tmp_path, policy, adapter, "base")
    modules = {name.rpartition(".lora_")[0] for name in load_file(tmp_path / lora.WEIGHTS)}
    assert modules == {f"base_model.model.model.layers.{i}.mlp.experts" for i in range(3)}
    config = json.loads((tmp_path / lora.CONFIG).read_text())
    assert config["target_modules"] == []
    assert config["target_parameters"] == [f"mlp.experts.{parameter}"]
    assert ("rank_pattern" in config) == (parameter == "gate_up_proj")
    # PEFT takes any end of the name.
    changed = config | {"target_parameters": [written.format(parameter)]}
    (tmp_path / lora.CONFIG).write_text(json.dumps(changed))
    read = Policy(policy.config, lora.read_config(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, lora.load(tmp_path, read, placed(read)), adapter)


def test_factors_of_single_experts_are_read_where_peft_has_joined_them(tmp_path: Path) -> None:
    policy = adapted("Qwen3MoeForCausalLM", targets=EXPERTS)
    adapter = random_adapter(policy)
    lora.save(tmp_path, policy, adapter, "base")
    config = json.loads((tmp_path / lora.CONFIG).read_text())
    # As PEFT 0.21 writes after `_convert_peft_config_moe`.
    joined = {
        "target_parameters": ["down_proj", "gate_up_proj"],
        "rank_pattern": {".*\\.gate_up_proj": 6},
        "alpha_pattern": {".*\\.gate_up_proj": 10.0},
    }
    (tmp_path / lora.CONFIG).write_text(json.dumps(config | joined))
    read = Policy(policy.config, lora.read_config(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, lora.load(tmp_path, read, placed(read)), adapter)

    apart = {"target_modules": ["w1"], "target_parameters": None}
    (tmp_path / lora.CONFIG).write_text(json.dumps(config | apart))
    name = "base_model.model.model.layers.0.block_sparse_moe.experts.1.w1.lora_A.weight"
    save_file({name: np.zeros((3, 16), np.float32)}, tmp_path / lora.WEIGHTS)
    with pytest.raises(ValueError, match=r"one tensor for all experts .*experts\.1\.w1.*PEFT"):
        lora.read_config(tmp_path)


def test_gate_and_up_of_experts_belong_together() -> None:
    policy = adapted("MixtralForCausalLM", targets=("experts.gate_proj", "q_proj"))
    expected = r"in one matrix, experts\.gate_up_proj; add experts\.up_proj, or remove the others"
    with pytest.raises(ValueError, match=expected):
        lora.abstract(policy)


def test_policies_without_experts_refuse_their_targets() -> None:
    policy = adapted("Qwen2ForCausalLM", targets=("o_proj", "experts.down_proj"))
    with pytest.raises(ValueError, match=r"has no experts\.down_proj; choose from q_proj, k_proj"):
        lora.abstract(policy)


def test_batches_of_several_adapters_refuse_experts() -> None:
    policy = adapted("Qwen2MoeForCausalLM", targets=(*MLP, *EXPERTS))
    base, adapters = random_params(policy), jax.tree.map(lambda x: x[None], random_adapter(policy))
    expected = r"found experts\.gate_proj, experts\.up_proj, experts\.down_proj; leave them out"
    for attach in (lora.attach_rows, lora.attach_stack):
        with pytest.raises(ValueError, match=expected):
            attach(base, adapters, jnp.ones(1))
    assert lora.find_batched_targets(policy)[-3:] == MLP
