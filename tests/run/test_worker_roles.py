"""What a run asks of the processes it has started, before it relies on them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from areal_jax.cluster import wire
from areal_jax.config.experiment import Experiment
from areal_jax.config.load import load_experiment, read_settings, written_settings
from areal_jax.errors import ConfigError
from areal_jax.records import Completion, Request, Sampling, TopLogprobs
from areal_jax.run.reward_worker import releases
from areal_jax.run.worker_pool import require_same_policy, require_same_releases
from areal_jax.run.worker_roles import EngineHost


def test_different_releases_are_refused_by_name() -> None:
    require_same_releases("engine 3", releases())
    skewed = {**releases(), "areal_jax": "0.0.9", "jax": "0.9"}
    here = releases()
    reported = (
        rf"engine 3 has areal_jax 0\.0\.9, expected {here['areal_jax']} and jax 0\.9, "
        rf"expected {here['jax']}: install"
    )
    with pytest.raises(ConfigError, match=reported):
        require_same_releases("engine 3", skewed)


def test_an_engine_with_another_policy_is_refused_with_both_fingerprints() -> None:
    facts = {"policy": "abcd", "devices": "1 cpu at there"}
    require_same_policy("engine 3", facts, "abcd")
    with pytest.raises(
        ConfigError,
        match=r"engine 3 \(1 cpu at there\) found another policy .* fingerprint ef01, found abcd",
    ):
        require_same_policy("engine 3", facts, "ef01")


def test_settings_text_restores_classes_of_an_experiment_file(
    tmp_path: Path,
) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import chz\nfrom areal_jax.config.experiment import Experiment\nfrom "
        "areal_jax.data.config import Synthetic\n@chz.chz\nclass Mine(Synthetic):\n    "
        "'''Problems of mine.'''\nexperiment = Experiment(name='own', num_steps=3, "
        "tasks=Mine(num_tasks=7))\n",
        encoding="utf-8",
    )
    experiment = load_experiment(str(own), "launch=ray", "seed=5")
    again = read_settings(written_settings(experiment), str(own))
    assert written_settings(again) == written_settings(experiment)
    assert (
        isinstance(again, Experiment) and type(again.tasks).__name__ == "Mine" and again.seed == 5
    )
    with pytest.raises(ConfigError, match="the settings of the run"):
        read_settings('{"areal_jax.experiment": "Nonsense"}', None)


def test_records_are_transferred_unchanged() -> None:
    reported = TopLogprobs(np.array([[1, 2]], np.int32), np.array([[-0.5, -1.5]], np.float32))
    sampled = Completion(
        np.array([4], np.int32),
        np.array([-0.25], np.float32),
        np.array([7], np.int32),
        "suspended",
        reported,
    )
    sampling = Sampling(
        9,
        0.7,
        5,
        0.9,
        (1, 2),
        min_p=0.1,
        min_new_tokens=2,
        repetition_penalty=1.1,
        num_top_logprobs=2,
    )
    request = Request(
        "a.b.0", np.array([3, 1], np.int32), 1, sampling, seed=11, min_version=2, resume=(sampled,)
    )
    again = wire.decode_request(wire.encode_request(request))
    assert (again.id, again.num_samples, again.sampling, again.seed, again.min_version) == (
        "a.b.0",
        1,
        sampling,
        11,
        2,
    )
    np.testing.assert_array_equal(again.prompt_tokens, request.prompt_tokens)
    (found,) = again.resume
    assert found.stop_reason == "suspended" and found.top_logprobs is not None
    for name in ("tokens", "logp", "versions"):
        np.testing.assert_array_equal(getattr(found, name), getattr(sampled, name))
    np.testing.assert_array_equal(found.top_logprobs.logp, reported.logp)


@pytest.mark.slow
def test_engine_host_reports_every_token_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One device, as a process of its own would have.
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:1])
    settings = (
        *(
            "launch=ray",
            "launch.report_every_s=0.02",
            "engine.num_slots=4",
            "engine.max_new_tokens=24",
        ),
        *("engine.max_prompt_tokens=16", "engine.steps_per_dispatch=2", "policy.random_init=true"),
    )
    experiment = load_experiment("aime", *settings)
    reports: list[tuple[str, Any]] = []

    def hear(topic: str, what: Any) -> None:
        reports.append((topic, what))
        if topic == "turn_requested":
            hosts[0].grant_turn(what)

    hosts: list[EngineHost] = []

    async def run() -> tuple[list[Completion], dict[int, list[Completion]]]:
        host = EngineHost(hear, written_settings(experiment), "aime")
        hosts.append(host)
        facts = await host.begin()
        assert facts["num_slots"] == 4 and facts["jax"] == jax.__version__
        weights = host._found.load()
        host._reader._line.deliver(0, weights)
        request = Request("r", np.arange(5, dtype=np.int32), 2, Sampling(24), seed=3)
        answer = wire.decode_completions(await host.submit(wire.encode_request(request)))
        await asyncio.sleep(0.1)
        await host.end()
        reported: dict[int, list[Completion]] = {0: [], 1: []}
        for topic, what in reports:
            if topic == "progress":
                for sample, (start, plain) in what["r"].items():
                    assert start == sum(len(each.tokens) for each in reported[sample])
                    reported[sample].append(wire.decode_completion(plain))
        return answer, reported

    answer, reported = asyncio.run(run())
    for sample, completion in enumerate(answer):
        known = np.concatenate([each.tokens for each in reported[sample]])
        assert known.tolist() == completion.tokens[: len(known)].tolist()
        assert sum(each.stop_reason != "suspended" for each in reported[sample]) <= 1
    assert [topic for topic, _ in reports if topic in ("turn_requested", "turn_ended")] == [
        "turn_requested",
        "turn_ended",
    ]
    assert any(topic == "measures" and what["tokens"][0] > 0 for topic, what in reports)
