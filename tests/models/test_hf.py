import dataclasses
import itertools
import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_policies import host_params, on_one_device, tiny_policy

from areal_jax.models import hf
from areal_jax.models.architecture import TRAITS
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.parallel.sharding import TRAIN_RULES, shardings

FIXTURES = Path(__file__).parent / "parity"


def assert_equal(left: Params, right: Params) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


def saved(
    folder: Path, architecture: str = "Qwen2ForCausalLM", **settings: object
) -> tuple[Policy, Params]:
    policy = tiny_policy(architecture, **settings)
    params = host_params(policy)
    hf.save(folder, policy, params)
    return policy, params


@pytest.mark.parametrize("architecture", tuple(TRAITS))
@pytest.mark.parametrize("tied", [True, False])
def test_load_inverts_save_bit_exactly(tmp_path, architecture, tied):
    policy, params = saved(tmp_path / "policy", architecture=architecture, tie_word_embeddings=tied)
    assert hf.read_config(tmp_path / "policy") == policy.config
    assert_equal(hf.load(tmp_path / "policy", policy, on_one_device(policy)), params)
    assert ("lm_head.weight" in load_file(tmp_path / "policy" / "model.safetensors")) is not tied


@pytest.mark.parametrize(
    "family",
    [
        *("qwen2", "qwen2_tied", "qwen3_moe", "llama_linear_biased", "gemma3", "glm4", "gpt_oss"),
        *("ministral", "mistral", "olmo2", "olmo3", "phi3", "qwen2_moe", "qwen3_5_moe"),
        "qwen3_next_dense",
    ],
)
def test_resaving_transformers_folder_is_bit_exact(tmp_path, family):
    policy = Policy(hf.read_config(FIXTURES / family))
    params = hf.load(FIXTURES / family, policy, on_one_device(policy))
    # From the host: a slice of an array on a device is a program for each shape.
    hf.save(tmp_path / "policy", policy, jax.device_get(params), dtype="bfloat16")
    theirs, ours = (
        load_file(folder / "model.safetensors")
        for folder in (FIXTURES / family, tmp_path / "policy")
    )
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(tensor.view(np.uint16), ours[name].view(np.uint16))


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3MoeForCausalLM"])
def test_large_policy_is_saved_as_several_files(tmp_path, architecture):
    folder, policy = tmp_path / "policy", tiny_policy(architecture)
    params = host_params(policy)
    hf.save(folder, policy, params, shard_bytes=4000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors_by_file = {file.name: load_file(file) for file in folder.glob("*.safetensors")}
    assert index["weight_map"] == {
        tensor: file for file, tensors in tensors_by_file.items() for tensor in tensors
    }
    assert index["metadata"]["total_size"] == 4 * policy.config.num_params
    assert sorted(tensors_by_file) == [
        f"model-{i:05}-of-{len(tensors_by_file):05}.safetensors"
        for i in range(1, len(tensors_by_file) + 1)
    ]
    assert (
        max(sum(array.nbytes for array in tensors.values()) for tensors in tensors_by_file.values())
        <= 4000
    )
    # Files are nearly full: two consecutive ones exceed the limit.
    sizes = [
        sum(array.nbytes for array in tensors_by_file[file].values())
        for file in sorted(tensors_by_file)
    ]
    assert len(sizes) > 3 and min(a + b for a, b in itertools.pairwise(sizes)) > 4000
    assert_equal(hf.load(folder, policy, on_one_device(policy)), params)
    # Saved again as one file: the earlier files must be gone, because readers would use them.
    newer = host_params(policy, seed=1)
    hf.save(folder, policy, newer)
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    hf.save(folder, policy, params, shard_bytes=4000)
    assert_equal(hf.load(folder, policy, on_one_device(policy)), params)


def test_oversized_tensor_has_its_own_file(tmp_path):
    policy = tiny_policy()
    params = host_params(policy)
    hf.save(tmp_path / "policy", policy, params, shard_bytes=1)
    assert len(list((tmp_path / "policy").glob("*.safetensors"))) == 3 * 12 + 3
    assert_equal(hf.load(tmp_path / "policy", policy, on_one_device(policy)), params)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_weights_are_refused(tmp_path, kept):
    policy, _ = saved(tmp_path / "policy")
    file = tmp_path / "policy" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(
        ValueError,
        match=r"policy/model\.safetensors: expected a complete safetensors file, found [\d,]+ bytes",
    ):
        hf.load(tmp_path / "policy", policy, on_one_device(policy))


def test_weights_that_do_not_match_the_config_are_refused(tmp_path):
    saved(tmp_path / "policy")
    other = tiny_policy(vocab_size=41, num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"do not match its config\.json") as error:
        hf.load(tmp_path / "policy", other, on_one_device(other))
    assert (
        "expected shape (41, 16), found (40, 16): model.embed_tokens.weight in model.safetensors"
        in str(error.value)
    )
    assert (
        "unexpected: model.layers.2.input_layernorm.weight of shape (16,) in model.safetensors"
        in str(error.value)
    )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("text", "expected"), [("<html>", "JSON"), ("[]", "a JSON object, found list")]
)
def test_invalid_json_is_refused(tmp_path, name, text, expected):
    policy, _ = saved(tmp_path / "policy")
    (tmp_path / "policy" / "model.safetensors").unlink()
    (tmp_path / "policy" / name).write_text(text)
    with pytest.raises(ValueError, match=rf"policy/{name}: expected {expected}"):
        hf.load(
            tmp_path / "policy", Policy(hf.read_config(tmp_path / "policy")), on_one_device(policy)
        )


def test_index_without_weight_map_is_refused(tmp_path):
    policy, _ = saved(tmp_path / "policy")
    (tmp_path / "policy" / "model.safetensors").unlink()
    (tmp_path / "policy" / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(
        ValueError,
        match=r"index\.json: expected weight_map with the file of each tensor, found metadata",
    ):
        hf.load(tmp_path / "policy", policy, on_one_device(policy))


def test_several_weight_files_are_loaded(tmp_path):
    policy, params = saved(tmp_path / "policy")
    tensors = load_file(tmp_path / "policy" / "model.safetensors")
    (tmp_path / "policy" / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, tensors_by_file in files.items():
        save_file({name: tensors[name] for name in tensors_by_file}, tmp_path / "policy" / file)
    index = {
        "weight_map": {
            name: file for file, tensors_by_file in files.items() for name in tensors_by_file
        }
    }
    (tmp_path / "policy" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_equal(hf.load(tmp_path / "policy", policy, on_one_device(policy)), params)
    deeper = tiny_policy(num_hidden_layers=4)
    with pytest.raises(
        ValueError,
        match=r"missing: model\.layers\.3\.input_layernorm\.weight of shape \(16,\) in any of 2",
    ):
        hf.load(tmp_path / "policy", deeper, on_one_device(deeper))
    (tmp_path / "policy" / "b.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"listed files in the folder, b\.safetensors not found"
    ):
        hf.load(tmp_path / "policy", policy, on_one_device(policy))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_files_become_float32_parameters(tmp_path, dtype):
    policy = tiny_policy()
    params = host_params(policy)
    hf.save(tmp_path / "policy", policy, params, dtype=dtype)
    loaded = hf.load(tmp_path / "policy", policy, on_one_device(policy))
    assert_equal(loaded, jax.tree.map(lambda leaf: leaf.astype(dtype).astype(np.float32), params))
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["torch_dtype"] == dtype


def test_each_device_gets_its_shard(tmp_path):
    policy, params = saved(tmp_path / "policy")
    devices = jax.devices()
    mesh = make_meshes(PlacementConfig(train_devices=4, train_tensor=2), devices[:5]).train
    layout = shardings(mesh, policy.axes(), policy.abstract(), TRAIN_RULES)
    loaded = hf.load(tmp_path / "policy", policy, layout)
    assert_equal(loaded, params)
    assert jax.tree.map(lambda leaf: leaf.sharding, loaded) == layout
    hf.save(tmp_path / "again", policy, loaded)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "policy" / "model.safetensors"
    ).read_bytes()


def test_all_wrong_tensors_are_reported_at_once(tmp_path):
    policy, _ = saved(tmp_path / "policy")
    file = tmp_path / "policy" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.gate_proj.bias"] = np.zeros(24, np.float32)
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((16, 16), np.float32)
    tensors["lm_head.weight"] = np.zeros((40, 16), np.int8)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"do not match its config\.json") as error:
        hf.load(tmp_path / "policy", policy, on_one_device(policy))
    for line in (
        "missing: model.norm.weight of shape (16,) in model.safetensors",
        "unexpected: model.layers.1.mlp.gate_proj.bias of shape (24,) in model.safetensors",
        (
            "expected shape (8, 16), found (16, 16): model.layers.0.self_attn.k_proj.weight in "
            "model.safetensors"
        ),
        "expected one of BF16, F16, F32, found I8: lm_head.weight in model.safetensors",
    ):
        assert line in str(error.value)


def test_redundant_tensors_are_ignored(tmp_path):
    policy, params = saved(tmp_path / "policy", tie_word_embeddings=True)
    file = tmp_path / "policy" / "model.safetensors"
    repeated = {
        "lm_head.weight": load_file(file)["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
    }
    save_file(load_file(file) | repeated, file)
    assert_equal(hf.load(tmp_path / "policy", policy, on_one_device(policy)), params)


def test_layers_that_predict_several_tokens_are_not_read(tmp_path):
    policy = tiny_policy("DeepseekV3ForCausalLM", num_nextn_predict_layers=1)
    params = host_params(policy)
    hf.save(tmp_path, policy, params)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"model.layers.3.eh_proj.weight": np.zeros((16, 32), np.float32)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    read = hf.load(tmp_path, policy, on_one_device(policy))
    jax.tree.map(np.testing.assert_array_equal, read, params)


@pytest.mark.parametrize("is_fused", [True, False])
def test_language_model_beside_a_vision_tower_is_read(tmp_path, caplog, is_fused):
    policy, params = saved(tmp_path / "text", "Qwen3_5MoeForCausalLM")
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    published = {"model.visual.pos_embed.weight": np.zeros((2, 2), np.float32)}
    for name, tensor in tensors.items():
        published[name.replace("model.", "model.language_model.", 1)] = tensor
    if is_fused:
        for i, kinds in itertools.product(range(4), (("gate", "up"), ("down",))):
            experts = f"model.language_model.layers.{i}.mlp.experts."
            # [experts, outputs, inputs], the gate before the up matrix.
            published[f"{experts}{'_'.join(kinds)}_proj"] = np.stack(
                [
                    np.concatenate([published.pop(f"{experts}{e}.{k}_proj.weight") for k in kinds])
                    for e in range(4)
                ]
            )
    folder = tmp_path / "published"
    folder.mkdir()
    save_file(published, folder / "model.safetensors")
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    del text["architectures"]
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text | {"tie_word_embeddings": True},
        "vision_config": {"depth": 1},
        "image_token_id": 30,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert hf.read_config(folder) == policy.config
    with caplog.at_level("INFO"):
        assert_equal(hf.load(folder, policy, on_one_device(policy)), params)
    assert "reading the language model; vision tensors=1 ignored" in caplog.text
    hf.save(tmp_path / "copy", policy, params, folder)
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["architectures"] == [
        "Qwen3_5MoeForCausalLM"
    ]
    assert hf.read_config(tmp_path / "copy") == policy.config
    assert load_file(tmp_path / "copy" / "model.safetensors").keys() == tensors.keys()


def test_folder_without_policy_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder with config\.json"):
        hf.read_config(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    policy = tiny_policy()
    with pytest.raises(
        FileNotFoundError, match=r"expected model\.safetensors or .* found pytorch_model\.bin"
    ):
        hf.load(tmp_path, policy, on_one_device(policy))


def test_save_copies_tokenizer_files_and_keeps_other_files(tmp_path):
    (tmp_path / "source").mkdir()
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "model-00001-of-00001.safetensors",
        "README.md",
    ):
        (tmp_path / "source" / name).write_text(name)
    policy = tiny_policy()
    params = host_params(policy)
    hf.save(tmp_path / "deep" / "policy", policy, params, tokenizer_folder=tmp_path / "source")
    files = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in (tmp_path / "deep" / "policy").iterdir()} == files
    # Saved again into an existing folder: its weights are replaced, other files stay, and no
    # temporary files are left.
    (tmp_path / "deep" / "policy" / "README.md").write_text("kept")
    newer = host_params(policy, seed=1)
    hf.save(tmp_path / "deep" / "policy", policy, newer)
    assert_equal(hf.load(tmp_path / "deep" / "policy", policy, on_one_device(policy)), newer)
    assert {file.name for file in (tmp_path / "deep" / "policy").iterdir()} == files | {"README.md"}
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["policy"]


def test_failed_save_leaves_no_files(tmp_path):
    policy = tiny_policy()
    params = host_params(policy) | {"norm": None}
    with pytest.raises(TypeError, match="NoneType"):
        hf.save(tmp_path / "policy", policy, params)
    assert list(tmp_path.iterdir()) == []


def edit_config(folder: Path, **changes: object) -> dict[str, object]:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return config


def test_untied_head_with_tied_config_is_refused(tmp_path):
    saved(tmp_path, tie_word_embeddings=False)
    edit_config(tmp_path, tie_word_embeddings=True)
    policy = Policy(hf.read_config(tmp_path))
    with pytest.raises(
        ValueError,
        match=r"expected lm_head\.weight in model\.safetensors to equal .* tie_word_embeddings=true",
    ):
        hf.load(tmp_path, policy, on_one_device(policy))


def test_single_file_and_index_together_are_refused(tmp_path):
    policy, params = saved(tmp_path)
    hf.save(tmp_path / "sharded", policy, params, shard_bytes=4000)
    for file in (tmp_path / "sharded").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(
        ValueError,
        match=r"expected model\.safetensors or model\.safetensors\.index\.json, found both",
    ):
        hf.load(tmp_path, policy, on_one_device(policy))


def test_index_of_a_single_file_is_accepted(tmp_path):
    policy, params = saved(tmp_path)
    placed = dict.fromkeys(load_file(tmp_path / "model.safetensors"), "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    assert_equal(hf.load(tmp_path, policy, on_one_device(policy)), params)


def test_tensor_in_two_files_is_refused(tmp_path):
    policy, params = saved(tmp_path)
    hf.save(tmp_path, policy, params, shard_bytes=4000)
    first, *_, last = sorted(tmp_path.glob("*.safetensors"))
    twice = {"model.embed_tokens.weight": load_file(first)["model.embed_tokens.weight"]}
    save_file(load_file(last) | twice, last)
    with pytest.raises(
        ValueError,
        match=r"expected each tensor in one file, found model\.embed_tokens\.weight in model-00001",
    ):
        hf.load(tmp_path, policy, on_one_device(policy))


def test_index_with_wrong_file_is_refused(tmp_path):
    policy, params = saved(tmp_path / "policy")
    hf.save(tmp_path / "policy", policy, params, shard_bytes=4000)
    path = tmp_path / "policy" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(
        ValueError,
        match=r"expected the file of each tensor, found another file for 1 tensors: model\.norm\.weight",
    ):
        hf.load(tmp_path / "policy", policy, on_one_device(policy))


def test_export_keeps_config_json_byte_for_byte(tmp_path):
    policy, params = saved(tmp_path / "original")
    config = edit_config(
        tmp_path / "original",
        transformers_version="4.51.0",
        torch_dtype="bfloat16",
        max_window_layers=21,
        sliding_window=4096,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        pad_token_id=3,
        use_cache=False,
        initializer_range=0.02,
        model_name="größer",
    )
    (tmp_path / "original" / "generation_config.json").write_text(
        '{"eos_token_id":  [1, 2], "temperature": 0.6}'
    )
    policy = Policy(hf.read_config(tmp_path / "original"))
    hf.save(tmp_path / "same", policy, params, tmp_path / "original", dtype="bfloat16")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "same" / name).read_bytes() == (
            tmp_path / "original" / name
        ).read_bytes()
    hf.save(tmp_path / "wide", policy, params, tmp_path / "original")
    assert json.loads((tmp_path / "wide" / "config.json").read_text()) == config | {
        "torch_dtype": "float32"
    }


def test_scalar_head_export_changes_only_head_keys(tmp_path):
    saved(tmp_path / "original")
    config = edit_config(
        tmp_path / "original",
        max_window_layers=21,
        problem_type="single_label_classification",
        dtype="bfloat16",
    )
    reward = Policy(
        dataclasses.replace(
            hf.read_config(tmp_path / "original"), readout="SequenceClassification", pad_token_id=5
        )
    )
    hf.save(tmp_path / "reward", reward, host_params(reward), tmp_path / "original")
    written = json.loads((tmp_path / "reward" / "config.json").read_text())
    assert written == config | {
        "architectures": ["Qwen2ForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": 5,
        "problem_type": None,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    assert hf.read_config(tmp_path / "reward") == reward.config


def test_reward_model_export_sets_the_pad_token(tmp_path):
    saved(tmp_path / "original")
    tokens = [{"id": 4, "content": "<end>"}, {"id": 5, "content": "<pad>"}]
    (tmp_path / "original" / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / "original" / name).write_text(
            json.dumps({"eos_token": "<end>", "pad_token": {"content": "<end>"}})
        )
    config = dataclasses.replace(
        hf.read_config(tmp_path / "original"), readout="SequenceClassification", pad_token_id=5
    )
    for _ in range(2):  # into a folder that exists, too
        hf.save(
            tmp_path / "reward",
            Policy(config),
            host_params(Policy(config)),
            tmp_path / "original",
        )
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            written = json.loads((tmp_path / "reward" / name).read_text())
            assert written == {"eos_token": "<end>", "pad_token": "<pad>"}


def test_export_keeps_the_tool_template(tmp_path):
    policy, params = saved(tmp_path / "original")
    template = Path("additional_chat_templates") / "tool_use.jinja"
    (tmp_path / "original" / template).parent.mkdir()
    (tmp_path / "original" / template).write_text("tools")
    for _ in range(2):
        hf.save(tmp_path / "written", policy, params, tmp_path / "original")
        assert (tmp_path / "written" / template).read_text() == "tools"


def test_ignored_keys_are_exported(tmp_path):
    _, params = saved(tmp_path / "original")
    edit_config(tmp_path / "original", frobnicate=2)
    with pytest.raises(
        ValueError,
        match=r"frobnicate=2 is not a known key of Qwen2ForCausalLM.*ignore_config_keys=frobnicate",
    ):
        hf.read_config(tmp_path / "original")
    policy = Policy(hf.read_config(tmp_path / "original", ["frobnicate", "elsewhere"]))
    hf.save(tmp_path / "copy", policy, params, tmp_path / "original")
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["frobnicate"] == 2
