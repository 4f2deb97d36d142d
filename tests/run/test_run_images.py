"""Reinforcement learning on tasks with images, from a file of rows to new weights."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path

import chz
import jax
import numpy as np
import pytest
import tokenizers
from jax.sharding import SingleDeviceSharding
from PIL import Image
from tiny_runs import tiny_experiment, write_tiny_policy

import areal_jax
from areal_jax.config.experiment import Experiment
from areal_jax.data.config import Files
from areal_jax.engine.config import EngineConfig
from areal_jax.errors import ConfigError
from areal_jax.image_files import decode_image, read_image
from areal_jax.models.decoder import Policy
from areal_jax.models.hf import load, read_config, save
from areal_jax.reports.sample_index import compact_group
from areal_jax.run.serving import engine_backend
from areal_jax.serve.bodies import Chat, read_chat
from areal_jax.serve.config import ServeConfig

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|>"
    "<|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_policy(folder: Path) -> Path:
    """A tiny Qwen2.5-VL with the tokens of images; its weights are sampled afresh."""
    write_tiny_policy(folder)
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.add_special_tokens(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"])
    words.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": TEMPLATE})
    )
    text = json.loads((folder / "config.json").read_text())
    vision = {
        **{"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48},
        **{"patch_size": 4, "out_hidden_size": 32, "window_size": 16},
        "fullatt_block_indexes": [1],
    }
    start, end, pad = (
        words.token_to_id(f"<|{name}|>") for name in ("vision_start", "vision_end", "image_pad")
    )
    changed = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "vocab_size": max(text["vocab_size"], words.get_vocab_size()),
        "vision_config": vision,
        **{"vision_start_token_id": start, "vision_end_token_id": end},
        **{"image_token_id": pad, "video_token_id": end},
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
    }
    (folder / "config.json").write_text(json.dumps(text | changed))
    sizes = {"patch_size": 4, "min_pixels": 64, "max_pixels": 1024}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    return folder


def image_uri(seed: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 30, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def write_tasks(file: Path) -> Path:
    rows = [
        {"prompt": "<image> How many?", "answer": "3", "image": image_uri(seed)}
        for seed in range(8)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    folder = tmp_path_factory.mktemp("images")
    (folder / "reward.py").write_text("def even(task, answer):\n    return len(answer) % 2 == 0\n")
    exp = tiny_experiment(write_policy(folder / "policy"))
    return chz.replace(
        exp,
        tasks=Files(path=str(write_tasks(folder / "train.jsonl"))),
        trainer=chz.replace(exp.trainer, row_image_tokens=64),
        rollout=chz.replace(exp.rollout, max_staleness=0),
    ).replace(f"rewards.function={folder / 'reward.py'}:even")


def test_tasks_with_images_need_room_in_rows(experiment: Experiment, tmp_path: Path) -> None:
    # 20 x 30 pixels are 2 x 4 squares of 8 x 8: both sides are rounded, ties to the even number.
    without = experiment.replace("trainer.row_image_tokens=0")
    with pytest.raises(ConfigError, match=r"row_image_tokens=0 leaves no .* at least 8, the"):
        areal_jax.train(without, tmp_path / "run")


def test_hints_of_a_teacher_are_refused_with_images(experiment: Experiment, tmp_path: Path) -> None:
    hinted = experiment.replace("trainer.teacher.path=current", "trainer.teacher.hint=It is even.")
    with pytest.raises(ConfigError, match=r"trainer\.teacher reads no images where it has a hint"):
        areal_jax.train(hinted, tmp_path / "run")


@pytest.mark.slow
def test_the_server_answers_about_images(experiment: Experiment) -> None:
    folder = Path(experiment.policy.path)
    policy = Policy(read_config(folder))
    save(folder, policy, policy.init(jax.random.key(0)), folder)
    config = ServeConfig(
        model=str(folder),
        engine=EngineConfig(
            num_slots=1, max_prompt_tokens=40, max_new_tokens=4, steps_per_dispatch=4
        ),
        devices=1,
    )
    vision = policy.config.vision
    assert vision is not None

    def ask(seed: int) -> Chat:
        content = [
            {"type": "image_url", "image_url": {"url": image_uri(seed)}},
            {"type": "text", "text": "How many?"},
        ]
        body = {"model": str(folder), "messages": [{"role": "user", "content": content}]}
        return read_chat(body | {"temperature": 0.0})

    async def act() -> list[tuple[np.ndarray, np.ndarray]]:
        async with engine_backend(config, "key") as source:
            asked = [ask(0), ask(0), ask(1)]
            prompts = [source.prompt_of(chat) for chat in asked]
            np.testing.assert_array_equal(prompts[0], prompts[2])
            assert (prompts[0] == vision.image_token_id).sum() == 8
            found = [
                await source.generate(prompt, chat.generation_params, None)
                for prompt, chat in zip(prompts, asked, strict=True)
            ]
            return [(completion.tokens, completion.logp) for (completion,) in found]

    (tokens, logp), (same_tokens, same_logp), (_, other_logp) = asyncio.run(act())
    np.testing.assert_array_equal(tokens, same_tokens)
    np.testing.assert_allclose(logp, same_logp, atol=1e-5)
    assert abs(logp[0] - other_logp[0]) > 1e-4


@pytest.mark.slow
def test_engine_and_trainer_see_the_same_images(experiment: Experiment, tmp_path: Path) -> None:
    result = areal_jax.train(experiment, tmp_path / "run")
    assert result.version == 2
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "trainer/log_ratio_rms" in line]
    assert len(steps) == 2
    # Log-probs of the engine and of the trainer differ by rounding alone.
    assert all(step["trainer/log_ratio_rms"] < 1e-4 for step in steps)
    assert all(step["trainer/grad_norm"] > 0 for step in steps)
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, samples) if row["group"] == 0]
    shown = compact_group(rows, None)["images"]
    assert [decode_image(read_image(uri)).size for uri in shown] == [(30, 20)]
    assert not any("images" in row for row in rows[1:])


@pytest.mark.slow
def test_a_critic_reads_images(experiment: Experiment, tmp_path: Path) -> None:
    result = areal_jax.train(experiment.replace("trainer.advantages=GAE"), tmp_path / "run")
    assert result.version == 2
    folder = tmp_path / "run" / "critic"
    critic = Policy(read_config(folder))
    assert critic.config.readout == "TokenClassification" and critic.config.vision is not None
    # The second update has a head that is not zero, whose gradient reaches the tower.
    one = SingleDeviceSharding(jax.devices()[0])
    trained = load(folder, critic, jax.tree.map(lambda _: one, critic.abstract()))
    before = critic.init(jax.random.key(experiment.seed))
    changed = jax.tree.map(lambda a, b: bool((np.asarray(a) != b).any()), trained, before)
    assert all(jax.tree.leaves(changed["vision"])) and changed["value"]
