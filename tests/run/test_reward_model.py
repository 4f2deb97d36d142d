"""A trained reward model as a reward: its scores, its share of the reward, and its server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import chz
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_runs import tiny_experiment, write_tiny_policy

import areal_jax
from areal_jax.config.load import load_experiment
from areal_jax.data.config import PromptConfig
from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.sft import encode_answer
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.engine.config import EngineConfig
from areal_jax.errors import ConfigError, InvalidRequest
from areal_jax.metrics.jsonl import read
from areal_jax.models import hf
from areal_jax.models.decoder import Policy
from areal_jax.records import Message, RewardResult, Task
from areal_jax.rewards import http_client
from areal_jax.rewards.config import RewardConfig, RewardModelConfig
from areal_jax.rewards.service import RewardService
from areal_jax.run.preflight import run_preflight
from areal_jax.run.reward_model import RewardModel, find_reward_model
from areal_jax.run.serving import engine_backend
from areal_jax.serve.app import App, listening
from areal_jax.serve.config import LimitsConfig, ServeConfig

PARITY = Path(__file__).parents[1] / "models" / "parity_scalar" / "reward"
TASK = Task("sum", (Message("user", "What is 1 + 1?"),), "2", "math")
POEM = Task("poem", (Message("user", "A poem!"),), "", "poem")
ANSWERS = ("\\boxed{2}", "\\boxed{3}", "I do not know.", "1+1=2\n" * 9 + "\\boxed{2}")
KEY = "the right one"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with random weights and the tokenizer of the embedded policy."""
    path = tmp_path_factory.mktemp("reward")
    language_model = write_tiny_policy(path / "policy")
    policy = Policy(
        dataclasses.replace(hf.read_config(language_model), readout="SequenceClassification")
    )
    params = jax.tree.map(np.asarray, policy.init(jax.random.key(1)))
    params["value"] = np.random.default_rng(0).normal(0.0, 1.0, params["value"].shape)
    hf.save(path / "model", policy, params, language_model)
    return path / "model"


def found(path: Path, **settings: Any) -> RewardModel:
    return find_reward_model(RewardModelConfig(path=str(path), **settings), jax.devices()[-1])


def score_of(result: RewardResult) -> float:
    assert result.score is not None and not result.failed
    return result.score


async def scores(model: RewardModel, answers: tuple[str, ...] = ANSWERS) -> list[float]:
    return list(await asyncio.gather(*(model.score(TASK.prompt, each) for each in answers)))


def with_model(
    model: RewardModel,
    act: Callable[[RewardService], Awaitable[None]],
    kinds: tuple[str, ...] = ("math",),
    **settings: Any,
) -> None:
    async def main() -> None:
        weight = settings.pop("weight", 1.0)
        config = RewardConfig(model=chz.replace(model.config, weight=weight), **settings)
        async with RewardService(config, kinds, scorer=model) as service:
            await act(service)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_scores_match_transformers_at_odd_lengths() -> None:
    expected = load_file(PARITY / "expected.safetensors")
    model = RewardModel(
        RewardModelConfig(path=str(PARITY), batch_size=3),
        PARITY,
        Policy(hf.read_config(PARITY)),
        HFTokenizer.from_folder(EMBEDDED),
        jax.devices()[0],
        "a limit",
    )

    async def main() -> None:
        await model.start()
        # Rows of 16, 32 and 64 tokens: the model was made for 64 positions.
        assert model.num_compilations == 3
        sequences = [tokens[tokens > 0] for tokens in expected["tokens"]]
        assert [len(tokens) for tokens in sequences] == [1, 2, 15, 16, 17, 33, 61]
        values = await asyncio.gather(*map(model.score_tokens, sequences))
        assert expected["values"].std() > 0.1
        np.testing.assert_allclose(values, expected["values"], atol=1e-5)
        # 7 sequences that arrive together, 3 at a time; nothing is compiled anew.
        assert model.counters() == {"model_tokens": 145.0, "model_batches": 3.0}
        assert model.num_compilations == 3
        with pytest.raises(InvalidRequest, match="at most 64 tokens, found 65; raise a limit"):
            await model.score_tokens(np.ones(65, np.int32))

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.slow
def test_scored_tokens_are_those_of_training(folder: Path) -> None:
    model = found(folder)
    for answer in ANSWERS:
        trained = encode_answer(model.tokenizer, TASK.prompt, answer, PromptConfig())
        np.testing.assert_array_equal(model.encode(TASK.prompt, answer), trained.tokens)


def test_whole_chat_template_is_scored_on_request(folder: Path) -> None:
    turn, template = found(folder), found(folder, scored_token="template")
    for answer in ANSWERS:
        ended, whole = (each.encode(TASK.prompt, answer) for each in (turn, template))
        # The template of the embedded policy has a line break after the end of a turn.
        np.testing.assert_array_equal(whole[:-1], ended)
        assert template.tokenizer.decode(whole[-1:]) == "\n"


@pytest.mark.slow
def test_score_does_not_depend_on_its_batch(folder: Path) -> None:
    together, alone = found(folder, batch_size=4), found(folder, batch_size=1)

    async def main() -> None:
        await together.start()
        values = await scores(together)
        assert together.counters()["model_batches"] == 1.0
        assert np.ptp(values) > 1e-3
        np.testing.assert_allclose(await scores(alone), values, atol=1e-5)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_raw_scores_and_verifier_are_components(folder: Path) -> None:
    model = found(folder)

    async def act(service: RewardService) -> None:
        values = await scores(model)
        for answer, value, verified in zip(ANSWERS, values, (1.0, 0.0, 0.0, 1.0), strict=True):
            result = await service(TASK, answer)
            assert result.kind == "scored" and not result.failed
            # A weight of 1: the verifier is only measured.
            assert result.to_reward(5.0, -5.0) == pytest.approx(value, abs=1e-5)
            assert result.components == {
                "verifier": verified,
                "reward_model": pytest.approx(value, abs=1e-5),
            }
        assert service.counters()["model_answers"] == 4.0

    with_model(model, act, scale="raw")


def test_unit_scores_are_sigmoids_beside_the_verifier(folder: Path) -> None:
    model = found(folder)

    async def act(service: RewardService) -> None:
        value, _, other, _ = (1 / (1 + math.exp(-each)) for each in await scores(model))
        right, none = await service(TASK, ANSWERS[0]), await service(TASK, ANSWERS[2])
        assert (right.kind, none.kind) == ("correct", "no_answer")
        assert right.score == pytest.approx(0.75 + 0.25 * value, abs=1e-6)
        assert none.score == pytest.approx(0.25 * other, abs=1e-6)

    with_model(model, act, weight=0.25)


def test_tasks_without_a_verifier_are_scored(folder: Path) -> None:
    model = found(folder)

    async def act(service: RewardService) -> None:
        result = await service(POEM, "roses")
        value = await model.score(POEM.prompt, "roses")
        assert result.components == {"reward_model": pytest.approx(value, abs=1e-6)}
        assert (await service(POEM, "")).components.keys() == {"reward_model"}

    with_model(model, act, ("poem",), scale="raw")
    with pytest.raises(ConfigError, match="no grader for tasks of kind poem"):
        with_model(model, act, ("poem",), scale="raw", weight=0.5)


def test_too_long_conversation_fails_the_answer(folder: Path) -> None:
    async def act(service: RewardService) -> None:
        result = await service(TASK, "1" * 100)
        assert result.kind == "infrastructure" and result.failed
        assert "at most 64 tokens, found 1" in result.detail
        assert "raise rewards.model.max_tokens" in result.detail

    with_model(found(folder, max_tokens=64), act)


def test_other_architectures_and_folders_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"read out as CausalLM; expected a reward model"):
        found(EMBEDDED)
    config = RewardConfig(model=RewardModelConfig(path=str(folder)))
    with pytest.raises(ConfigError, match=r"in the process of a run; set rewards\.model\.url"):
        RewardService(config)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[str]:
    config = ServeConfig(model=str(folder), engine=ENGINE)
    async with (
        engine_backend(config, KEY) as backend,
        listening(App(backend, LimitsConfig()), "127.0.0.1", 0, 1.0) as port,
    ):
        yield f"http://127.0.0.1:{port}/v1"


ENGINE = EngineConfig(num_slots=4, max_prompt_tokens=64, max_new_tokens=64)


def post(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_server_scores_as_this_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(http_client.KEY_VARIABLE, KEY)

    async def main() -> None:
        expected = await scores(found(folder))
        async with serving(folder) as url:
            config = RewardConfig(model=RewardModelConfig(url=url), scale="raw")
            async with RewardService(config) as service:
                results = await asyncio.gather(*(service(TASK, answer) for answer in ANSWERS))
                long = await service(TASK, "1" * 200)
                assert service.counters()["model_tokens"] > 100
            np.testing.assert_allclose([score_of(each) for each in results], expected, atol=1e-5)
            assert long.failed and "at most 128 tokens" in long.detail
            # The form of vLLM, also without the prefix; with its activation, the sigmoid.
            turns = [{"role": "user", "content": "What is 1 + 1?"}]
            whole = {"messages": [*turns, {"role": "assistant", "content": ANSWERS[0]}]}
            root = url.removesuffix("/v1")
            status, reply = await asyncio.to_thread(post, f"{root}/classify", whole)
            assert status == 200
            assert reply["data"][0]["probs"] == [pytest.approx(1 / (1 + math.exp(-expected[0])))]
            for path, body, words in (
                ("classify", {"messages": turns}, "ends with an answer of the assistant"),
                ("classify", whole | {"model": "other"}, "does not exist"),
                ("completions", {"model": str(folder), "prompt": "1"}, "generates nothing"),
            ):
                status, reply = await asyncio.to_thread(post, f"{url}/{path}", body)
                assert status in (400, 404) and words in reply["error"]["message"]

    asyncio.run(asyncio.wait_for(main(), 120))


def test_server_refusal_names_its_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(http_client.KEY_VARIABLE, "another key")

    async def main() -> None:
        async with serving(folder) as url:
            config = RewardConfig(model=RewardModelConfig(url=url))
            async with RewardService(config) as service:
                result = await service(TASK, ANSWERS[0])
        assert result.failed and "Incorrect API key provided" in result.detail

    asyncio.run(asyncio.wait_for(main(), 120))


def start_server(folder: Path, port: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    settings = (f"model={folder}", f"port={port}", f"api_key={KEY}", "engine.num_slots=2")
    return subprocess.Popen(
        [sys.executable, "-m", "areal_jax.serve", *settings, "engine.max_prompt_tokens=128"],
        env=environment,
    )


@pytest.mark.slow
def test_killed_and_restarted_server_loses_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, of_a_command: dict[str, str]
) -> None:
    monkeypatch.setenv(http_client.KEY_VARIABLE, KEY)
    monkeypatch.setattr(http_client, "RETRIES_S", (0.2,))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    answers = tuple(f"\\boxed{{{number}}}" for number in range(100))

    async def main() -> None:
        expected = await scores(found(folder), answers)
        config = RewardModelConfig(url=f"http://127.0.0.1:{port}/v1")
        server = start_server(folder, port, of_a_command)
        try:
            async with RewardService(RewardConfig(model=config, scale="raw")) as service:
                assert (await service(TASK, answers[0])).score is not None
                waiting = [asyncio.create_task(service(TASK, answer)) for answer in answers]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                server.kill()
                await asyncio.to_thread(server.wait, 60)
                num_lost = sum(not each.done() for each in waiting)
                server = start_server(folder, port, of_a_command)
                results = await asyncio.gather(*waiting)
                assert num_lost > 0 and service.counters()["failed"] == 0.0
            np.testing.assert_allclose([score_of(each) for each in results], expected, atol=1e-5)
        finally:
            server.kill()
            await asyncio.to_thread(server.wait, 60)

    asyncio.run(asyncio.wait_for(main(), 240))


@pytest.mark.slow
def test_run_trains_on_the_scores(folder: Path, tmp_path: Path) -> None:
    experiment = tiny_experiment(write_tiny_policy(tmp_path / "policy")).replace(
        f"rewards.model.path={folder}", "rewards.scale=raw"
    )
    run = tmp_path / "run"
    areal_jax.train(experiment, run)
    rows = list(read(run / "metrics.jsonl"))
    last = rows[-1]
    assert last["rewards/model_answers"] >= 16 and last["rewards/failed"] == 0
    assert last["trainer/reward/reward_model"] == pytest.approx(last["trainer/reward"])
    assert last["trainer/reward_std"] > 0
    assert 0 <= last["trainer/reward/verifier"] <= 1


@pytest.mark.slow
def test_preflight_names_wrong_answers_that_please_the_model(folder: Path) -> None:
    experiment = load_experiment("aime", f"rewards.model.path={folder}", "tasks.num_tasks=8")
    report = run_preflight(experiment, "aime")
    # Random weights score some wrong answer above a right one.
    assert any(
        "lower rewards.model.weight" in str(finding)
        and "less than the reward of a right" in str(finding)
        for finding in report.findings
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("rewards.model.batch_size=2",), "a folder or behind a URL; set one of them"),
        (("rewards.model.path=a", "rewards.model.url=b"), "set one of them"),
        (("rewards.model.path=a", "rewards.judge.url=b"), "which both score answers"),
        (("rewards.model.path=a", "launch=Ray"), "serve it with areal-serve"),
    ],
)
def test_contradictory_settings_are_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_experiment("aime", *overrides)
