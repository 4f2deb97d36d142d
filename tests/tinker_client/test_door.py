"""Requests without the client: keys, limits, malformed bodies, retries."""

# pyright: reportMissingImports=false
from __future__ import annotations

import gzip
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from backports import zstd
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tiny_server import call, datum, serving

from areal_jax.api.training_server import ListeningServer, read_config
from areal_jax.errors import ConfigError
from areal_jax.tinker.journal import Journal

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")

PROTOBUF = {"Content-Type": "application/x-protobuf"}
POSTS = (
    *("create_session", "session_heartbeat", "create_model", "get_info", "forward_backward"),
    *("optim_step", "save_weights", "load_weights", "save_weights_for_sampler", "unload_model"),
    *("create_sampling_session", "asample", "retrieve_future", "cancel_future", "weights_info"),
    *("client/config", "telemetry"),
)


def forward_backward(
    model: str, seq: int, *data: types.Datum, loss: str = "cross_entropy"
) -> bytes:
    given = types.ForwardBackwardInput(data=list(data), loss_fn=loss, loss_fn_config=None)
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id=model, seq_id=seq)
    return forward_backward_request_to_proto(request).SerializeToString()


def new_model(server: ListeningServer) -> tuple[str, str]:
    """Create a session and a model; return their ids."""
    session = call(server.base_url, "create_session", {"tags": []})[1]["session_id"]
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": server.model,
        "lora_config": {"rank": 4, "seed": 1},
    }
    status, future = call(server.base_url, "create_model", body)
    assert status == 200
    assert result(server, future)[1]["model_id"] == future["model_id"]
    return session, future["model_id"]


def result(server: ListeningServer, future: dict[str, Any]) -> tuple[int, Any]:
    """Retrieve the result of a future, which the server holds for a while."""
    while True:
        found = call(server.base_url, "retrieve_future", {"request_id": future["request_id"]})
        if found[0] != 408:
            return found


def test_every_endpoint_needs_the_key(server: ListeningServer) -> None:
    for path in POSTS:
        for key in ("", "tml-other", "\u00e9"):
            assert call(server.base_url, path, {}, key=key)[0] == 401
    assert call(server.base_url, "training_runs", method="GET", key="")[0] == 401
    assert call(server.base_url, "healthz", method="GET", key="") == (200, {"status": "ok"})


def test_a_key_of_another_form_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="starts with tml-"):
        read_config(["api_key=secret"])


def test_malformed_bodies_are_the_clients_errors(server: ListeningServer) -> None:
    session, model = new_model(server)
    rng = random.Random(0)
    values = (
        *(None, True, -1, 0, 3, 1 << 70, 0.5, 1e400, "", "x" * 1000, "\x00", [], {}, [[[]]]),
        *([1, "a"], {"chunks": [{"type": "image"}]}, {"chunks": 3}, {"max_tokens": -1}),
        *({"rank": 10**9}, {"seed": "a"}, {"learning_rate": "nan"}, session, model, server.model),
        *(f"tinker://{model}/weights/../../x", "tinker://a/b", f"{model}:0", f"{session}:sample:0"),
    )
    fields = (
        *("session_id", "model_id", "seq_id", "model_seq_id", "base_model", "lora_config", "path"),
        *("adam_params", "sampling_session_id", "prompt", "sampling_params", "request_id"),
        *("num_samples", "sampling_session_seq_id", "model_path", "tinker_path", "optimizer"),
    )
    requests = [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 5000, b"null", b'"x"']
    for path in POSTS:
        for raw in requests:
            status, found = call(server.base_url, path, raw)
            assert status < 500 and (status == 200 or found["category"] == "user"), (path, raw[:9])
        for _ in range(25):
            body = {name: rng.choice(values) for name in rng.sample(fields, rng.randint(1, 9))}
            # A numbered operation that never comes would be waited for by retrieve_future.
            if path == "retrieve_future":
                body["request_id"] = rng.choice(("x", f"{model}:0", 3, None))
            status, found = call(server.base_url, path, json.dumps(body).encode())
            assert status < 500, (path, body, found)
    missing, packed = forward_backward("none", 1, datum([1, 2, 3])), bytes(1 << 27)
    for encoding, compress in (("zstd", zstd.compress), ("gzip", gzip.compress)):
        headers = PROTOBUF | {"Content-Encoding": encoding}
        for body, expected in ((missing, 404), (packed, 413)):
            found = call(server.base_url, "forward_backward", compress(body), headers=headers)
            assert found[0] == expected
    for encoding in ("gzip", "zstd", "br", "x"):
        headers = PROTOBUF | {"Content-Encoding": encoding}
        assert call(server.base_url, "forward_backward", b"junk", headers=headers)[0] < 500
    valid = forward_backward(model, 999, datum([1, 2, 3]))
    for _ in range(100):
        start = rng.randrange(len(valid))
        junk = rng.randbytes(rng.randint(0, 30))
        data = valid[:start] + junk + valid[start + rng.randint(0, 30) :]
        assert call(server.base_url, "forward_backward", data, headers=PROTOBUF)[0] < 500


def test_invalid_operations_fail_as_the_users_and_do_not_stop_the_model(
    server: ListeningServer,
) -> None:
    session, model = new_model(server)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("optim_step", {"adam_params": {"learning_rate": -1.0}}),
        ("optim_step", {"adam_params": {"momentum": 0.1}}),
        ("save_weights", {"path": "../up"}),
        ("save_weights_for_sampler", {"path": "latest"}),
        ("load_weights", {"path": "tinker://none/weights/a", "optimizer": False}),
    ]
    for seq, (path, body) in enumerate(wrong, 1):
        status, future = call(server.base_url, path, {"model_id": model, "seq_id": seq} | body)
        assert status == 200
        assert result(server, future)[1]["category"] == "user"
    last = {"model_id": model, "seq_id": len(wrong) + 1, "adam_params": {"learning_rate": 0.1}}
    assert "metrics" in result(server, call(server.base_url, "optim_step", last)[1])[1]
    assert session in model


def test_a_retry_gets_the_same_future_and_is_not_applied_twice(server: ListeningServer) -> None:
    _, model = new_model(server)
    body = forward_backward(model, 1, datum([5, 6, 7]))
    futures = [call(server.base_url, "forward_backward", body, headers=PROTOBUF) for _ in range(3)]
    assert {each[1]["request_id"] for each in futures} == {f"{model}:1"}
    other = forward_backward(model, 1, datum([5, 6, 8]))
    assert call(server.base_url, "forward_backward", other, headers=PROTOBUF)[0] == 400
    step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.0}}
    norms = [
        result(server, call(server.base_url, "optim_step", step)[1])[1]["metrics"]["grad_norm"]
        for _ in range(2)
    ]
    # Without gradients, as a second application would have it, the norm is 0.
    assert norms[0] == norms[1] > 0
    step["seq_id"] = 3
    none = result(server, call(server.base_url, "optim_step", step)[1])[1]["metrics"]
    assert none["grad_norm"] == 0.0


def test_operations_run_in_the_order_of_their_numbers(server: ListeningServer) -> None:
    _, model = new_model(server)
    step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.0}}
    later = call(server.base_url, "optim_step", step)[1]
    body = forward_backward(model, 1, datum([5, 6, 7]))
    call(server.base_url, "forward_backward", body, headers=PROTOBUF)
    assert result(server, later)[1]["metrics"]["grad_norm"] > 0


def test_large_bodies_and_full_queues_are_refused(policy: Path, tmp_path: Path) -> None:
    limits = (
        *("limits.max_body_bytes=20000", "limits.max_json_bytes=2000", "limits.hold_s=0.05"),
        *("limits.max_queued_operations=3", "limits.max_queued_samples=2", "limits.max_models=1"),
    )
    with serving(policy, tmp_path, *limits) as server:
        url = server.base_url
        session, model = new_model(server)
        assert call(url, "create_session", b"{" + b" " * 3000 + b"}")[0] == 413
        assert call(url, "forward_backward", b"x" * 30_000, headers=PROTOBUF)[0] == 413
        assert call(url, "forward_backward", b"{}")[0] == 415
        # Number 1 is missing, so that the others wait.
        body: dict[str, Any] = {"model_id": model, "adam_params": {}}
        statuses = [call(url, "optim_step", body | {"seq_id": seq})[0] for seq in range(2, 7)]
        assert statuses == [200, 200, 200, 429, 429]
        refused = call(url, "optim_step", body | {"seq_id": 7})[1]
        state = [refused[name] for name in ("queue_state", "limit", "most", "found")]
        assert state == ["paused_rate_limit", "max_queued_operations", 3, 3]
        pending = call(url, "retrieve_future", {"request_id": f"{model}:2"})
        assert pending == (
            408,
            {"type": "try_again", "request_id": f"{model}:2", "queue_state": "active"},
        )
        # The one that the others wait for is accepted.
        assert call(url, "optim_step", body | {"seq_id": 1})[0] == 200
        second = {"session_id": session, "model_seq_id": 1, "base_model": server.model}
        assert call(url, "create_model", second)[0] == 429


def test_a_session_without_heartbeat_ends_with_its_models(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_jax.tinker.service._EXPIRY_PERIOD_S", 0.02)
    with serving(policy, tmp_path, "limits.session_timeout_s=0.3") as server:
        session = call(server.base_url, "create_session", {})[1]["session_id"]
        assert call(server.base_url, "session_heartbeat", {"session_id": session})[0] == 200
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": server.model}
        assert call(server.base_url, "create_sampling_session", body)[0] == 200
        time.sleep(0.5)
        assert call(server.base_url, "create_sampling_session", body)[0] == 410
        assert call(server.base_url, "session_heartbeat", {"session_id": session})[0] == 410


def test_a_session_that_its_client_finishes_ends(server: ListeningServer) -> None:
    session, model = new_model(server)
    finish = f"sessions/{session}/finish", {"reason": {"type": "success"}}
    assert [call(server.base_url, *finish)[0] for _ in range(2)] == [200, 200]
    assert call(server.base_url, "get_info", {"model_id": model})[0] == 404
    assert call(server.base_url, "session_heartbeat", {"session_id": session})[0] == 410
    assert call(server.base_url, "sessions/none/finish", {})[0] == 404


def test_one_server_has_a_run_folder(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(ConfigError, match="another server may use it"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()
