"""LoRA adapters: equality with merged weights, and PEFT's files (fixtures of parity_peft/make.py)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file
from tiny_policies import host_params, on_one_device, random_params, tiny_policy

from areal_jax.models import hf, lora
from areal_jax.models.attention import packed_attention
from areal_jax.models.config import LoRA, Target
from areal_jax.models.decoder import Params, Policy
from areal_jax.models.traits import TRAITS

FIXTURES = Path(__file__).parent / "parity_peft"
BASES = Path(__file__).parent / "parity"
ADAPTERS = ["qwen2", "llama", "qwen3"]
TOKENS = jax.device_put(np.random.default_rng(1).integers(0, 40, (2, 12)).astype(np.int32))


def adapted(architecture: str = "Qwen2ForCausalLM", **settings: Any) -> Policy:
    return Policy(tiny_policy(architecture).config, LoRA(**{"rank": 3, "alpha": 5.0, **settings}))


def random_adapter(policy: Policy, seed: int = 7) -> Params:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: (rng.normal(size=leaf.shape) / 3).astype(leaf.dtype), lora.abstract(policy)
    )


def placed(policy: Policy) -> Params:
    return jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), lora.abstract(policy))


def merged(policy: Policy, base: Params, adapter: Params) -> Params:
    return jax.device_put(lora.merge(policy, base, adapter))


@partial(jax.jit, static_argnames=("policy", "unroll", "remat", "absorbs"))
def logits(policy: Policy, params: Params, tokens: jax.Array = TOKENS, **how: Any) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    attend = packed_attention(jnp.ones_like(tokens))
    hidden, _, _ = policy.hidden(
        params, tokens, positions, attend, compute_dtype=jnp.float32, **how
    )
    return hidden @ policy.head(params)


def of_fixture(family: str) -> tuple[Policy, Params, Params]:
    policy = Policy(hf.read_config(BASES / family), lora.read_config(FIXTURES / family))
    return (
        policy,
        hf.load(BASES / family, policy, on_one_device(policy)),
        lora.load(FIXTURES / family, policy, placed(policy)),
    )


# The fused matrices of phi3 and of linear attention have another form when written again.
@pytest.mark.parametrize(
    "family",
    [
        *(*ADAPTERS, "phi3", "qwen3_moe", "qwen2_moe"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gpt_oss", "qwen3_5", "qwen3_next")
        ),
    ],
)
def test_adapter_logits_match_peft(family: str) -> None:
    policy, base, adapter = of_fixture(family)
    lora.check_base(FIXTURES / family, str(BASES / family))
    expected = load_file(FIXTURES / family / "expected.safetensors")
    ours = logits(policy, lora.attach(policy, base, adapter), jnp.asarray(expected["tokens"]))
    np.testing.assert_allclose(ours, expected["logits"], atol=1e-4)
    silent = jax.tree.map(np.zeros_like, jax.device_get(adapter))
    alone = logits(policy, lora.attach(policy, base, silent), jnp.asarray(expected["tokens"]))
    assert np.abs(alone - expected["logits"]).mean() > 0.3  # an adapter that says something


@pytest.mark.parametrize("family", [*ADAPTERS, "qwen2_moe"])
def test_resaving_peft_folder_is_bit_exact(family: str, tmp_path: Path) -> None:
    policy, _, adapter = of_fixture(family)
    lora.save(tmp_path, policy, adapter, f"tests/models/parity/{family}")
    theirs, ours = (load_file(folder / lora.WEIGHTS) for folder in (FIXTURES / family, tmp_path))
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(tensor, ours[name], strict=True)
    theirs, ours = (
        json.loads((folder / lora.CONFIG).read_text()) for folder in (FIXTURES / family, tmp_path)
    )
    for config in (theirs, ours):
        for name in ("target_modules", "target_parameters"):
            config[name] = sorted(config.get(name) or [])
    assert {name: theirs[name] for name in ours} == ours
    assert lora.read_config(tmp_path) == policy.lora
    assert sorted(file.name for file in tmp_path.iterdir()) == [lora.CONFIG, lora.WEIGHTS]


@pytest.mark.parametrize(
    "architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"]
)
@pytest.mark.slow
def test_adapter_equals_merged_weights(architecture: str) -> None:
    policy = adapted(architecture)
    base, adapter = random_params(policy), random_adapter(policy)
    expected = logits(policy, merged(policy, base, adapter))
    np.testing.assert_allclose(
        logits(policy, lora.attach(policy, base, adapter)), expected, atol=1e-5
    )
    unstacked = lora.attach(policy, policy.unstack(base), policy.unstack(adapter))
    np.testing.assert_allclose(logits(policy, unstacked, unroll=True), expected, atol=1e-5)
    assert jnp.abs(logits(policy, base) - expected).mean() > 0.1


@pytest.mark.slow
def test_adapter_gradients_follow_from_merged_weights() -> None:
    policy = adapted(rslora=True)
    base, adapter = random_params(policy), random_adapter(policy)
    weights = jnp.asarray(np.random.default_rng(5).normal(size=(2, 12, 40)) / 100, jnp.float32)

    def loss(params: Params) -> jax.Array:
        return (logits(policy, params, remat="full") * weights).sum()

    ours = jax.jit(jax.grad(lambda adapter: loss(lora.attach(policy, base, adapter))))(adapter)
    of_merged = jax.jit(jax.grad(loss))(merged(policy, base, adapter))
    # y = x (W + s A B), s = alpha / sqrt(rank): dA = s dW Bᵀ and dB = s Aᵀ dW.
    scale = 5.0 / 3**0.5
    for room, names in {"attn": "qkvo", "mlp": ("gate", "up", "down")}.items():
        for name in names:
            a, b = (np.asarray(adapter["layers"][room][name][letter]) for letter in "ab")
            flat_a, flat_b = a.reshape(3, -1, 3), b.reshape(3, 3, -1)
            dw = np.asarray(of_merged["layers"][room][name]).reshape(
                3, flat_a.shape[1], flat_b.shape[2]
            )
            found = ours["layers"][room][name]
            np.testing.assert_allclose(
                found["a"], (scale * dw @ flat_b.swapaxes(1, 2)).reshape(a.shape), atol=1e-5
            )
            np.testing.assert_allclose(
                found["b"], (scale * flat_a.swapaxes(1, 2) @ dw).reshape(b.shape), atol=1e-5
            )
            assert np.abs(found["a"]).max() > 1e-3


@pytest.mark.slow
def test_frozen_weights_have_no_gradient_computation() -> None:
    policy = Policy(
        tiny_policy(hidden_size=64, intermediate_size=192, num_hidden_layers=2).config, LoRA(rank=1)
    )
    base, adapter = random_params(policy), random_adapter(policy)

    def flops(of: Callable[[Params, Params], jax.Array], *arguments: Params) -> float:
        cost = jax.jit(jax.grad(of)).lower(*arguments).compile().cost_analysis()
        assert cost is not None
        return cost["flops"]

    full = flops(lambda base, _: logits(policy, base, unroll=True).sum(), base, adapter)
    part = flops(
        lambda adapter, base: logits(policy, lora.attach(policy, base, adapter), unroll=True).sum(),
        adapter,
        base,
    )
    # Forward pass, and the half of the backward pass for x: two thirds, plus a little for rank 1
    # and attention.
    assert 0.6 < part / full < 0.8


def test_new_adapter_is_a_no_op_and_sampled_like_pefts() -> None:
    policy = adapted(rank=8)
    adapter = jax.jit(lambda key: lora.init(policy, key))(jax.random.key(0))
    base = random_params(policy)
    np.testing.assert_array_equal(
        logits(policy, lora.attach(policy, base, adapter)), logits(policy, base)
    )
    attn = adapter["layers"]["attn"]
    assert not attn["q"]["b"].any()
    # Uniform within 1 / sqrt(inputs): inputs are the width 16 of q, and 4 heads of 4 of o. Its
    # deviation is that / sqrt(3).
    for name in "qo":
        a = np.asarray(attn[name]["a"])
        assert 0.24 < np.abs(a).max() < 0.25
        assert a.std() == pytest.approx(0.25 / 3**0.5, rel=0.1)  # 3·16·8 samples
    assert (attn["q"]["a"][0] != attn["q"]["a"][1]).all() and (
        attn["q"]["a"] != attn["k"]["a"]
    ).all()


def test_bfloat16_base_preserves_small_adapter_updates() -> None:
    # W is representable in bfloat16; updates of a thousandth of W are a quarter of its rounding
    # step, so that merging would lose them.
    policy = adapted()

    def rounded(params: Params) -> Params:
        return jax.tree.map(
            lambda leaf: np.asarray(leaf).astype(jnp.bfloat16).astype(np.float32), params
        )

    base = rounded(host_params(policy))
    adapter = jax.tree.map(lambda leaf: np.float32(0.01) * leaf, random_adapter(policy))
    whole = merged(policy, base, adapter)
    attached = lora.attach(policy, base, adapter)
    alone, exact, of_merged, ours = (
        np.asarray(logits(policy, each)) for each in (base, whole, rounded(whole), attached)
    )
    exact, of_merged, ours = exact - alone, of_merged - alone, ours - alone
    assert np.abs(ours - exact).mean() < 0.01 * np.abs(exact).mean()
    assert np.abs(of_merged - exact).mean() > 0.5 * np.abs(exact).mean()


def broken(tmp_path: Path, tensors: Callable[[dict], Any] = lambda _: None, **config: Any) -> Path:
    """Copy the fixture of qwen2 with changed settings or tensors."""
    folder = tmp_path / "adapter"
    shutil.copytree(FIXTURES / "qwen2", folder)
    found = load_file(folder / lora.WEIGHTS)
    tensors(found)
    save_file(found, folder / lora.WEIGHTS)
    (folder / lora.CONFIG).write_text(
        json.dumps(json.loads((folder / lora.CONFIG).read_text()) | config)
    )
    return folder


K0 = "base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda found: found.pop(K0), f"missing: {K0} of shape (16, 4)"),
        (
            lambda found: found.update({K0: np.zeros((9, 4), np.float32)}),
            f"expected shape (16, 4), found (9, 4): {K0}",
        ),
        (
            lambda found: found.update({K0: np.zeros((16, 4), np.int8)}),
            f"expected one of BF16, F16, F32, found I8: {K0}",
        ),
        (
            lambda found: found.update({"lm_head.weight": np.zeros(2, np.float32)}),
            "unexpected: lm_head.weight of shape (2,)",
        ),
    ],
)
def test_mismatched_adapter_tensors_are_named(
    tmp_path: Path, tensors: Callable[[dict], Any], message: str
) -> None:
    folder = broken(tmp_path, tensors)
    policy = Policy(hf.read_config(BASES / "qwen2"), lora.read_config(folder))
    with pytest.raises(ValueError) as raised:
        lora.load(folder, policy, placed(policy))
    assert str(folder / lora.WEIGHTS) in str(raised.value)
    assert str(raised.value).splitlines()[1:] == [f"  {message} in {lora.WEIGHTS}"]


def test_adapter_of_another_architecture_is_refused() -> None:
    policy = Policy(hf.read_config(BASES / "qwen3"), lora.read_config(FIXTURES / "qwen2"))
    with pytest.raises(
        ValueError,
        match=r"expected shape \(48, 4\), found \(32, 4\): .*layers.0.self_attn.q_proj.lora_B",
    ):
        lora.load(FIXTURES / "qwen2", policy, placed(policy))


def test_adapter_keys_can_be_ignored(tmp_path: Path) -> None:
    folder = broken(tmp_path, lora_dropout=0.05, frobnicate=2)
    # The setting may also contain keys of config.json.
    ignored = ["lora_dropout", "frobnicate", "attention_dropout", "r"]
    assert lora.read_config(folder, ignored) == lora.read_config(FIXTURES / "qwen2")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"peft_type": "IA3"},
            "peft_type='IA3' is not supported for a LoRA adapter; only peft_type='LORA'",
        ),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        (
            {"lora_dropout": 0.05},
            "lora_dropout=0.05 is not supported for a LoRA adapter; only lora_dropout=0.0",
        ),
        ({"use_dora": True}, "use_dora=True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern={'q_proj': 2}"),
        ({"target_modules": ["q_proj", "lm_head"]}, "found ['q_proj', 'lm_head']"),
        (
            {"init_lora_weights": "pissa_niter_16"},
            "found init_lora_weights='pissa_niter_16'",
        ),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"init_lora_weights": "corda"}, "init_lora_weights='corda'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq'"),
        ({"frobnicate": 2}, "frobnicate=2 is not a known key of a LoRA adapter"),
        ({"use_rslora": "yes"}, "expected use_rslora to be true or false"),
        ({"r": 0}, "expected r to be a positive integer"),
    ],
)
def test_unsupported_adapter_settings_are_refused(
    tmp_path: Path, setting: dict[str, Any], message: str
) -> None:
    folder = broken(tmp_path, **setting)
    with pytest.raises(ValueError) as raised:
        lora.read_config(folder)
    assert str(raised.value).startswith(f"{folder / lora.CONFIG}: ")
    assert message in str(raised.value)


@pytest.mark.parametrize("begun", [True, False, "gaussian", "eva"])
def test_inits_that_keep_the_base_are_accepted(tmp_path: Path, begun: bool | str) -> None:
    assert lora.read_config(broken(tmp_path, init_lora_weights=begun)) == lora.read_config(
        FIXTURES / "qwen2"
    )


@pytest.mark.parametrize(
    ("base", "policy", "fits"),
    [
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B", True),
        ("Qwen/Qwen2.5-7B", "/models/Qwen2.5-7B", True),
        (None, "Qwen/Qwen2.5-7B", True),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B", False),
    ],
)
def test_adapter_of_another_base_is_refused(
    tmp_path: Path, base: str | None, policy: str, fits: bool
) -> None:
    folder = broken(tmp_path, base_model_name_or_path=base)
    if fits:
        lora.check_base(folder, policy)
    else:
        with pytest.raises(
            ValueError, match=rf"{lora.CONFIG}: expected an adapter of '{policy}', found .*'{base}'"
        ):
            lora.check_base(folder, policy)


def test_missing_or_damaged_adapter_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json at .*; set policy\.adapter"):
        lora.read_config(tmp_path)
    folder = broken(tmp_path)
    policy = Policy(hf.read_config(BASES / "qwen2"), lora.read_config(folder))
    weights = folder / lora.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(
        ValueError,
        match=r"adapter_model\.safetensors: expected a complete safetensors file, found [\d,]+ bytes",
    ):
        lora.load(folder, policy, placed(policy))
    weights.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"expected adapter_model\.safetensors and adapter_config\.json"
    ):
        lora.load(folder, policy, placed(policy))
    (folder / lora.CONFIG).write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json: expected JSON"):
        lora.read_config(folder)


def test_missing_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = adapted(targets=("q_proj", "up_proj"))
    declared = policy.abstract()
    del declared["layers"]["mlp"]["up"]
    monkeypatch.setattr(policy, "abstract", lambda: declared)
    with pytest.raises(ValueError, match=r"policy\.lora\.targets: Qwen2ForCausalLM has no up_proj"):
        lora.abstract(policy)


def test_targets_in_one_fused_matrix_belong_together() -> None:
    config = tiny_policy("Glm4ForCausalLM").config
    lora.abstract(Policy(config, LoRA(targets=("q_proj", "down_proj"))))
    with pytest.raises(ValueError, match=r"gate_proj, up_proj in one matrix.*add up_proj"):
        lora.abstract(Policy(config, LoRA(targets=("q_proj", "gate_proj"))))


@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_of_fused_matrices_are_read_back(tmp_path: Path, rslora: bool) -> None:
    policy = Policy(tiny_policy("Phi3ForCausalLM").config, LoRA(rank=2, rslora=rslora))
    adapter = random_adapter(policy)
    lora.save(tmp_path, policy, adapter, "base")
    assert lora.read_config(tmp_path) == policy.lora
    one = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), lora.abstract(policy))
    loaded = lora.load(tmp_path, policy, one)
    jax.tree.map(np.testing.assert_array_equal, loaded, adapter)
    # The update of the fused matrix is that of its three targets.
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    module = "base_model.model.model.layers.1.self_attn.qkv_proj"
    update = tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
    apart = [
        np.asarray(adapter["layers"]["attn"][name]["a"][1])
        @ np.asarray(adapter["layers"]["attn"][name]["b"][1]).reshape(2, -1)
        for name in ("q", "k", "v")
    ]
    np.testing.assert_allclose(update.T, np.concatenate(apart, axis=1), atol=1e-5)
    # A matrix that is not block-diagonal has no such factors.
    tensors[f"{module}.lora_B.weight"] += 1
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="block-diagonal"):
        lora.load(tmp_path, policy, one)


@pytest.mark.parametrize("architecture", [name for name in TRAITS if not TRAITS[name].vision])
@pytest.mark.slow
def test_every_family_adds_its_adapter_to_its_weights(architecture: str) -> None:
    config = tiny_policy(architecture).config
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    if config.latent is not None:
        attention = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    linear = [target for target in get_args(Target) if target.startswith(("in_proj_", "out_"))]
    parts = ("gate_proj", "up_proj", "down_proj")
    experts = [target for target in get_args(Target) if config.moe and target[:8] == "experts."]
    has_mlp = config.dense_layers or (config.moe and config.moe.shared_expert_intermediate_size)
    mlp = (*(parts if has_mlp else ()), *experts)
    targets = (*attention, *mlp, *(linear if config.linear else ()))
    policy = Policy(config, LoRA(rank=2, targets=targets))
    assert set(lora.find_targets(policy)) == set(targets)
    base = random_params(policy)
    adapter = random_adapter(policy)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 12)))
    ours = logits(policy, lora.attach(policy, base, adapter), tokens)
    merged = jax.tree.map(jnp.asarray, lora.merge(policy, base, adapter))
    np.testing.assert_allclose(ours, logits(policy, merged, tokens), atol=2e-3, rtol=1e-3)
    assert np.abs(ours - logits(policy, base, tokens)).mean() > 0.3
    absorbed = logits(policy, lora.attach(policy, base, adapter), tokens, absorbs=True)
    np.testing.assert_allclose(ours, absorbed, atol=2e-3, rtol=1e-3)


def test_adapter_of_linear_attention_is_saved_by_the_names_of_peft(tmp_path: Path) -> None:
    targets = tuple(each for each in get_args(Target) if each.startswith(("in_proj_", "out_")))
    policy = adapted("Qwen3NextForCausalLM", targets=targets)
    adapter = random_adapter(policy)
    lora.save(tmp_path, policy, adapter, "base")
    read = Policy(policy.config, lora.read_config(tmp_path))
    assert read.lora is not None and set(read.lora.targets) == set(targets)
    jax.tree.map(np.testing.assert_array_equal, lora.load(tmp_path, read, placed(read)), adapter)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    fused = "base_model.model.model.layers.{}.linear_attn.in_proj_qkvz.lora_A.weight"
    # Four matrices of rank 3 with 16 inputs, in all layers but the second.
    assert tensors[fused.format(3)].shape == (12, 16)
    assert fused.format(1) not in tensors


def test_latent_adapter_is_saved_by_the_names_of_peft(tmp_path: Path) -> None:
    policy = adapted("DeepseekV3ForCausalLM", targets=("o_proj", "kv_b_proj"))
    adapter = random_adapter(policy)
    lora.save(tmp_path, policy, adapter, "base")
    read = Policy(policy.config, lora.read_config(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, lora.load(tmp_path, read, placed(read)), adapter)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.2.self_attn.kv_b_proj.lora_A.weight"
    assert tensors[name].shape == (3, 8)  # rank and latent
