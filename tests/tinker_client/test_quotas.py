"""Several keys of one server: who sees what, quotas, and a flood beside another's work."""

# pyright: reportMissingImports=false
from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types
from tiny_server import call, datum, serving

from areal_jax.api.training_server import ListeningServer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")

TENANTS = """
[flood]
api_key = "tml-flood"
[quiet]
api_key = "tml-quiet"
max_sessions = 2
max_models = 1
max_requests = 3
max_tokens = 100
"""
ADAM = types.AdamParams(learning_rate=1e-3)


@pytest.fixture(scope="module")
def server(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ListeningServer]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "tenants.toml").write_text(TENANTS)
    given = f"tenants={folder / 'tenants.toml'}", "limits.hold_s=0.05"
    with serving(policy, folder, *given) as found:
        yield found


def client(server: ListeningServer, key: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.base_url, api_key=key)


@pytest.fixture(scope="module")
def quiet(server: ListeningServer) -> tinker.TrainingClient:
    service = client(server, "tml-quiet")
    return service.create_lora_training_client(base_model=server.model, rank=4).result()


@pytest.fixture(scope="module")
def flood(server: ListeningServer) -> list[tinker.TrainingClient]:
    service = client(server, "tml-flood")
    return [
        service.create_lora_training_client(base_model=server.model, rank=4).result()
        for _ in range(3)
    ]


def test_a_tenant_sees_nothing_of_another(server: ListeningServer, quiet, flood) -> None:
    url, session = server.base_url, quiet.model_id.partition(":")[0]
    path = quiet.save_state("mine").result().path
    sampler = quiet.save_weights_and_get_sampling_client().result()._sampling_session_id
    own = flood[0].model_id
    requests = (
        ("get_info", {"model_id": quiet.model_id}),
        ("unload_model", {"model_id": quiet.model_id}),
        ("optim_step", {"model_id": quiet.model_id, "seq_id": 9}),
        ("load_weights", {"model_id": own, "seq_id": 1, "path": path}),
        ("session_heartbeat", {"session_id": session}),
        ("create_model", {"session_id": session, "model_seq_id": 5, "base_model": server.model}),
        ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 7}),
        ("asample", {"sampling_session_id": sampler, "seq_id": 5, "prompt": {"chunks": []}}),
        ("retrieve_future", {"request_id": f"{quiet.model_id}:0"}),
        ("cancel_future", {"request_id": f"{quiet.model_id}:0"}),
        ("weights_info", {"tinker_path": path}),
        (f"sessions/{session}/finish", {}),
    )
    for name, body in requests:
        assert call(url, name, body, key="tml-flood")[0] == 404, name
    for name in (f"sessions/{session}", f"samplers/{sampler}", f"training_runs/{quiet.model_id}"):
        assert call(url, name, method="GET", key="tml-flood")[0] == 404, name
        assert call(url, name, method="GET", key="tml-quiet")[0] == 200, name
    for key, num_runs, num_checkpoints in (("tml-flood", 3, 0), ("tml-quiet", 1, 1)):
        found = [
            call(url, name, method="GET", key=key)[1][name]
            for name in ("training_runs", "checkpoints", "sessions")
        ]
        assert [len(each) for each in found[:2]] == [num_runs, num_checkpoints]
        assert (session in found[2]) == (key == "tml-quiet")


def test_each_quota_refuses_with_429_and_others_go_on(
    server: ListeningServer, quiet, flood
) -> None:
    url, model, key = server.base_url, quiet.model_id, "tml-quiet"
    session = model.partition(":")[0]
    second = {"session_id": session, "model_seq_id": 8, "base_model": server.model}
    status, refused = call(url, "create_model", second, key=key)
    assert (status, refused["limit"], refused["most"]) == (429, "max_models", 1)
    statuses = [call(url, "create_session", {}, key=key)[0] for _ in range(2)]
    assert statuses == [200, 429]
    # Their first operation is missing, so that they wait.
    later = {"model_id": model, "adam_params": {}}
    statuses = [call(url, "optim_step", later | {"seq_id": seq}, key=key)[0] for seq in range(5, 9)]
    assert statuses == [200, 200, 200, 429]
    # Another tenant is not refused meanwhile.
    assert "grad_norm" in flood[0].optim_step(ADAM).result().metrics
    body = {"sampling_session_id": f"{session}:sample:77", "seq_id": 0}
    body |= {"prompt": {"chunks": [{"tokens": [5, 6]}]}, "num_samples": 4}
    base = {"session_id": session, "sampling_session_seq_id": 77, "base_model": server.model}
    assert call(url, "create_sampling_session", base, key=key)[0] == 200
    status, refused = call(url, "asample", body, key=key)
    assert (status, "quota.max_tokens=100, found 258" in refused["error"]) == (400, True)
    small = body | {"sampling_params": {"max_tokens": 4}}
    assert call(url, "asample", small, key=key)[1]["limit"] == "max_requests"
    for seq in (5, 6, 7):
        call(url, "cancel_future", {"request_id": f"{model}:{seq}"}, key=key)


def test_a_flood_of_requests_does_not_starve_another_tenant(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text(TENANTS)
    with serving(policy, tmp_path, f"tenants={tmp_path / 'tenants.toml'}") as server:
        flood, quiet = (
            [
                client(server, f"tml-{name}")
                .create_lora_training_client(base_model=server.model, rank=4)
                .result()
                for _ in range(count)
            ]
            for name, count in (("flood", 3), ("quiet", 1))
        )
        prompt = types.ModelInput.from_ints([5, 6])
        params = types.SamplingParams(max_tokens=32, seed=1, stop=[])
        samplers = [
            each[0].save_weights_and_get_sampling_client().result() for each in (flood, quiet)
        ]
        samplers[0].sample(prompt, 1, params).result()  # compiles
        waiting: list[Any] = [samplers[0].sample(prompt, 1, params) for _ in range(80)]
        time.sleep(0.2)
        # In order of arrival, all 80 would be done before.
        samplers[1].sample(prompt, 1, params).result()
        sampled_before = sum(each.done() for each in waiting)
        for each in waiting:
            each.result()
        # Three models with 8 operations each, and one with one.
        for model in (*flood, *quiet):
            model.forward([datum([5, 6, 7])], "cross_entropy").result()  # compiles
        steps = [model.optim_step(ADAM) for _ in range(8) for model in flood]
        quiet[0].optim_step(ADAM).result()
        stepped_before = sum(each.future().done() for each in steps)
        for each in steps:
            each.result()
    print(f"done before: {sampled_before} of 80 samples, {stepped_before} of 24 steps")
    assert sampled_before <= 40 and stepped_before <= 12
