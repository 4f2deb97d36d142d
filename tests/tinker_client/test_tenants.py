"""Several clients of one server, and samplers that follow a model."""

# pyright: reportMissingImports=false
from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from tinker import types
from tiny_server import call, datum, logprobs, service, serving

from areal_jax.tinker.batches import BatchPrograms

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")

ADAM = types.AdamParams(learning_rate=1e-2)
PARAMS = types.SamplingParams(max_tokens=10, seed=3, stop=[])
RANKS = {"first": 4, "second": 8}


class Tenant:
    """A client with a model of its own, step by step."""

    def __init__(self, base_url: str, model: str, name: str) -> None:
        self.service = service(base_url)
        self.training = self.service.create_lora_training_client(
            base_model=model, rank=RANKS[name], seed=len(name)
        ).result()
        rng = np.random.default_rng(RANKS[name])
        # Of more than limits.max_datums=4 datums: two requests.
        self.batches = [[rng.integers(3, 400, 9).tolist() for _ in range(6)] for _ in range(3)]
        self.outputs = list[Any]()

    def steps(self) -> Iterator[None]:
        for batch in self.batches:
            data = [datum(tokens) for tokens in batch]
            future = self.training.forward_backward(data, "cross_entropy")
            yield
            step = self.training.optim_step(ADAM)
            self.outputs += [logprobs(future.result()), step.result().metrics]
            yield
            sampler = self.training.save_weights_and_get_sampling_client()
            samples = sampler.sample(types.ModelInput.from_ints(batch[0]), 2, PARAMS).result()
            self.outputs += [(s.tokens, s.logprobs) for s in samples.sequences]
            yield


def test_interleaved_tenants_get_what_each_gets_alone(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With room for one model and one adapter, so that both are moved in and out all the time.
    limits = "limits.max_resident_models=1", "limits.max_engines=1", "limits.max_adapters=1"
    alone, together = {}, []
    run = BatchPrograms.run

    def recorded(self: BatchPrograms, loss: Any, works: Any, **settings: Any) -> Any:
        together.append(len(works))
        time.sleep(0.3)  # meanwhile the requests of the other arrive
        return run(self, loss, works, **settings)

    monkeypatch.setattr(BatchPrograms, "run", recorded)
    with serving(policy, tmp_path / "little", *limits) as server:
        for name in RANKS:
            tenant = Tenant(server.base_url, server.model, name)
            assert sum(1 for _ in tenant.steps()) == 9
            alone[name] = tenant.outputs
        tenants = {name: Tenant(server.base_url, server.model, name) for name in RANKS}
        for _ in zip(*(tenant.steps() for tenant in tenants.values()), strict=True):
            pass
    for name, tenant in tenants.items():
        # Every bit: of log-probs, gradient norms and samples.
        assert len(alone[name]) == 12
        assert repr(tenant.outputs) == repr(alone[name])
    assert repr(alone["first"]) != repr(alone["second"])
    # In one engine and in one batch, where both ask at the same time.
    assert set(together) == {1}
    with serving(policy, tmp_path / "much") as server:
        tenants = {name: Tenant(server.base_url, server.model, name) for name in RANKS}
        meeting = Barrier(len(tenants))

        def run_all(tenant: Tenant) -> None:
            for _ in tenant.steps():
                meeting.wait(60)

        with ThreadPoolExecutor(len(tenants)) as threads:
            for done in [threads.submit(run_all, each) for each in tenants.values()]:
                done.result()
    assert max(together) == 2
    for name, tenant in tenants.items():
        assert repr(tenant.outputs) == repr(alone[name])


def test_a_sampler_that_follows_a_model_takes_new_weights_between_tokens(server, client) -> None:
    training = client.create_lora_training_client(base_model=server.model, rank=4).result()
    path = f"tinker://{training.model_id}/sampler_weights/latest"
    sampler = client.create_sampling_client(model_path=path).result()
    long = types.SamplingParams(max_tokens=64, seed=1, stop=[])
    data, found = [datum([5, 6, 7, 8])], list[int]()
    training.optim_step(ADAM).result()
    for attempt in range(20):
        future = sampler.sample(types.ModelInput.from_ints([5, 6]), 4, long)
        bounded = {
            "sampling_session_id": sampler._sampling_session_id,
            "seq_id": 1000 + attempt,
            "prompt": {"chunks": [{"tokens": [5, 6]}]},
            "num_samples": 4,
            "sampling_params": {"max_tokens": 64, "stop": [], "max_staleness": 0},
        }
        young = call(server.base_url, "asample", bounded)[1]
        first = 1 + 3 * attempt
        for _ in range(3):
            training.forward_backward(data, "cross_entropy")
            training.optim_step(ADAM).result()
        future.result()
        request = f"{sampler._sampling_session_id}:{attempt}"
        status, result = call(server.base_url, "retrieve_future", {"request_id": request})
        assert status == 200
        for sequence in result["sequences"]:
            versions = sequence["versions"]
            assert len(versions) == len(sequence["tokens"]) == 64
            assert versions == sorted(versions)
            # Never older than what was trained before the request, nor newer than what is there.
            assert first <= versions[0] and versions[-1] <= first + 3
        found.append(len(set(result["sequences"][0]["versions"])))
        status, result = call(server.base_url, "retrieve_future", young)
        assert status == 200
        if "error" in result:
            assert result["category"] == "user" and "max_staleness=0" in result["error"]
        else:
            assert len({v for each in result["sequences"] for v in each["versions"]}) == 1
        if max(found) > 1:
            break
    assert max(found) > 1


def test_what_is_idle_leaves_the_devices_and_comes_back(
    policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("areal_jax.tinker.service._EXPIRY_PERIOD_S", 0.05)
    caplog.set_level("INFO")
    with serving(policy, tmp_path, "limits.idle_timeout_s=0.1") as server:
        training = service(server.base_url).create_lora_training_client(server.model, 4).result()
        data, prompt = [datum([5, 6, 7, 8])], types.ModelInput.from_ints([5, 6])
        # Gradients without their step move too.
        training.forward_backward(data, "cross_entropy").result()
        sampler = training.save_weights_and_get_sampling_client().result()
        outputs = []
        for _ in range(2):
            caplog.clear()
            training.forward(data, "cross_entropy").result()
            samples = sampler.sample(prompt, 1, PARAMS).result().sequences
            outputs.append((samples[0].tokens, samples[0].logprobs))
            end_s = time.monotonic() + 30
            while not {"model moved", "idle engine"} <= {r.msg[:11] for r in caplog.records}:
                assert time.monotonic() < end_s
                time.sleep(0.05)
        assert outputs[0] == outputs[1]
        assert training.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_checkpoints_expire_also_after_a_restart(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_jax.tinker.service._EXPIRY_PERIOD_S", 1000.0)
    with serving(policy, tmp_path) as server:
        client = service(server.base_url)
        training = client.create_lora_training_client(base_model=server.model, rank=4).result()
        model, rest = training.model_id, client.create_rest_client()
        kept, brief = (
            training.save_state(name, ttl_seconds=3600).result().path for name in ("kept", "brief")
        )
        for each in rest.list_checkpoints(model).result().checkpoints:
            assert each.expires_at is not None
            assert abs((each.expires_at - each.time).total_seconds() - 3600) <= 60
        for path, ttl_s in ((kept, None), (brief, 1)):
            rest.set_checkpoint_ttl_from_tinker_path(path, ttl_s).result()
        ttl = f"training_runs/{model}/checkpoints/weights/kept/ttl"
        for wrong in ({"ttl_seconds": 0}, {"ttl_seconds": "x"}, {}):
            assert call(server.base_url, ttl, wrong, method="PUT")[0] == 400
        other = ttl.replace("kept", "..")
        assert call(server.base_url, other, {"ttl_seconds": 5}, method="PUT")[0] == 404
    monkeypatch.setattr("areal_jax.tinker.service._EXPIRY_PERIOD_S", 0.05)
    with serving(policy, tmp_path) as server:
        end_s, rest = time.monotonic() + 30, service(server.base_url).create_rest_client()
        while len(found := rest.list_checkpoints(model).result().checkpoints) > 1:
            assert time.monotonic() < end_s
        assert [(each.tinker_path, each.expires_at) for each in found] == [(kept, None)]
    assert [each.name for each in tmp_path.glob("checkpoints/*/weights/*")] == ["kept"]


def test_inflight_samplers_share_later_saves(server, client) -> None:
    training = client.create_lora_training_client(base_model=server.model, rank=4, seed=2).result()
    first = training.save_weights_and_get_sampling_client(kind="inflight")
    prompt = types.ModelInput.from_ints([5, 6, 7])
    before = first.compute_logprobs(prompt).result()
    training.forward_backward([datum([5, 6, 7, 8])], "cross_entropy")
    training.optim_step(ADAM).result()
    assert first.compute_logprobs(prompt).result() == before
    second = training.save_weights_and_get_sampling_client(kind="inflight")
    after = first.compute_logprobs(prompt).result()
    assert after != before and after == second.compute_logprobs(prompt).result()
    samples = [s.sample(prompt, 1, PARAMS).result().sequences[0] for s in (first, second)]
    assert samples[0].tokens == samples[1].tokens


def test_all_parameters_are_trained_by_one_client(policy: Path, tmp_path: Path) -> None:
    with serving(policy, tmp_path, "lora=false") as server:
        client = service(server.base_url)
        training = client.create_lora_training_client(base_model=server.model, rank=4).result()
        assert training.get_info().is_lora is False
        data = [datum([5, 6, 7, 8])]
        losses = []
        for _ in range(4):
            future = training.forward_backward(data, "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            losses.append(future.result().metrics["loss:sum"])
        assert losses == sorted(losses, reverse=True)
        sampler = training.save_weights_and_get_sampling_client()
        scored = sampler.compute_logprobs(types.ModelInput.from_ints([5, 6, 7, 8])).result()
        (now,) = logprobs(training.forward(data, "cross_entropy").result())
        np.testing.assert_allclose(scored[1:], now, atol=1e-5)
        sampled = sampler.sample(types.ModelInput.from_ints([5, 6]), 1, PARAMS).result()
        assert len(sampled.sequences[0].tokens) == 10
        path = training.save_state("all").result().path
        training.load_state_with_optimizer(path).result()
        (again,) = logprobs(training.forward(data, "cross_entropy").result())
        assert np.array_equal(again, now)
