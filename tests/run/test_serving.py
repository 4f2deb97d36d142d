"""What a server's `model` may name, and that it is what answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import chz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saved_runs import adapter, embedded_params, moved, save_run, save_run_and_export

from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.config.load import load_experiment, write_config
from areal_jax.data.policy_files import EMBEDDED
from areal_jax.engine.config import EngineConfig
from areal_jax.errors import ConfigError
from areal_jax.models import lora
from areal_jax.models.decoder import Params
from areal_jax.records import Request, Sampling
from areal_jax.run.serving import engine_backend, find_served
from areal_jax.serve.config import ServeConfig

CONFIG = ServeConfig(
    engine=EngineConfig(num_slots=1, max_prompt_tokens=16, max_new_tokens=16), devices=1
)


def named(model: Path | str, **settings: str) -> ServeConfig:
    return chz.replace(CONFIG, model=str(model), **settings)


def is_loaded(config: ServeConfig, expected: Params, version: int) -> None:
    found = find_served(config)
    weights = found.load()
    assert weights.version == version
    jax.tree.map(np.testing.assert_array_equal, weights.params, found.engine.layout(expected))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run_and_export(tmp_path_factory.mktemp("run"))


@pytest.mark.slow
def test_folder_run_and_checkpoint_are_served(run: Path) -> None:
    is_loaded(named("embedded"), embedded_params(), 0)
    is_loaded(named(run), moved(), 3)
    is_loaded(named(run / "policy"), moved(), 0)
    is_loaded(named(run / CHECKPOINTS / "2"), jax.tree.map(jnp.zeros_like, moved()), 2)


@pytest.mark.slow
def test_adapter_is_served_with_its_base_policy_or_run(tmp_path: Path) -> None:
    policy, trained = adapter()
    save_run(tmp_path / "run", trained, "policy.lora.rank=2")
    lora.save(tmp_path / "run" / "adapter", policy, trained, str(EMBEDDED))
    of_run, of_folder = (
        find_served(named(tmp_path / "run" / name)).load().params for name in ("", "adapter")
    )
    jax.tree.map(np.testing.assert_array_equal, of_run, of_folder)
    np.testing.assert_array_equal(
        of_run["layers"][1]["attn"]["q"].w, embedded_params()["layers"]["attn"]["q"][1]
    )
    # An adapter without a base name needs the setting.
    file = tmp_path / "run" / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(ConfigError, match=r"is an adapter that names no base policy; set base"):
        find_served(named(tmp_path / "run" / "adapter"))
    reported = find_served(named(tmp_path / "run" / "adapter", base="embedded")).load().params
    jax.tree.map(np.testing.assert_array_equal, reported, of_folder)


def test_invalid_models_are_refused_by_name(run: Path, tmp_path: Path) -> None:
    write_config(load_experiment("aime"), tmp_path / "config.json")
    for config, words in (
        (named(tmp_path), "this run has no checkpoint yet"),
        (named(run / CHECKPOINTS / "9"), "no checkpoint of version 9; found 2, 3"),
        (
            named(run / CHECKPOINTS / "x"),
            r"model=.*expected RUN/checkpoints/VERSION with a number, found 'x'",
        ),
        (
            named("embedded", base="embedded"),
            "base=embedded is for adapters, and model=embedded is none",
        ),
        (
            named("/nowhere"),
            r"model=/nowhere: expected 'embedded', 'embedded_vision', an existing folder.*; or a run folder",
        ),
        (chz.replace(CONFIG, devices=99), "devices=99: expected at most the 8 devices"),
    ):
        with pytest.raises(ConfigError, match=words):
            find_served(config)


@pytest.mark.slow
def test_served_run_answers_with_its_weights(run: Path) -> None:
    async def ask() -> list[int]:
        async with engine_backend(named(run, served_name="mine"), "key") as source:
            assert source.serves("mine")
            (completion,) = await source.engine.submit(
                Request("a", np.arange(5, dtype=np.int32), 1, Sampling(4), seed=0)
            )
            return completion.versions.tolist()

    assert set(asyncio.run(ask())) == {3}
