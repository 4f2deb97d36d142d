"""A training server with a tiny policy, in a thread or a process, and clients of it."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tinker
from tinker import types
from tiny_runs import write_tiny_policy

from areal_jax.api.training_server import ListeningServer, listening_server, read_config
from areal_jax.models import hf
from areal_jax.models.config import PolicyConfig
from areal_jax.run.models import find_policy

KEY = "tml-tests"
SETTINGS = (
    "devices=1",
    f"api_key={KEY}",
    "max_tokens=64",
    "micro_batch_tokens=128",
    "remat=none",
    "engine.num_slots=4",
    "engine.max_prompt_tokens=32",
    "engine.max_new_tokens=64",
    "engine.prefill_chunk_tokens=32",
    "engine.steps_per_dispatch=2",
    "limits.max_datums=4",
)


def write_policy(folder: Path) -> Path:
    """Write a Hugging Face folder with a tiny policy and random weights."""
    write_tiny_policy(folder)
    policy = find_policy(PolicyConfig(path=str(folder)), folder)
    hf.save(folder, policy, policy.init(jax.random.key(0)))
    return folder


@contextmanager
def serving(policy: Path, run_folder: Path, *overrides: str) -> Iterator[ListeningServer]:
    """Run a server in a thread."""
    given = (f"model={policy}", f"run_folder={run_folder}", "port=0", *SETTINGS, *overrides)
    found, started, stops = list[ListeningServer](), threading.Event(), list[Any]()

    async def serve() -> None:
        stop = asyncio.Event()
        async with listening_server(read_config(given)) as server:
            found.append(server)
            stops.append((asyncio.get_running_loop(), stop))
            started.set()
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        finally:
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait(60)
    assert found, "the server did not start"
    try:
        yield found[0]
    finally:
        loop, stop = stops[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)


@dataclass
class Process:
    """A server in a process."""

    process: subprocess.Popen[str]
    base_url: str
    model: str

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def process(
    policy: Path, run_folder: Path, environment: dict[str, str], *overrides: str, port: int = 0
) -> Iterator[Process]:
    """Run a server in a process, which is killed at the end."""
    given = (f"model={policy}", f"run_folder={run_folder}", f"port={port}", *SETTINGS, *overrides)
    started = subprocess.Popen(
        [sys.executable, "-m", "areal_jax.tinker", *given],
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {"JAX_PLATFORMS": "cpu"},
    )
    assert started.stdout is not None
    first = started.stdout.readline()
    model, _, base_url = first.strip().partition(" trains at ")
    server = Process(started, base_url, model)
    try:
        assert base_url, first
        yield server
    finally:
        server.kill()
        started.stdout.close()


def service(base_url: str) -> tinker.ServiceClient:
    """Return a client without telemetry."""
    os.environ["TINKER_TELEMETRY"] = "0"
    return tinker.ServiceClient(base_url=base_url, api_key=KEY)


def ready(client: Any) -> Any:
    """Return a client, which newer releases return as a future."""
    return client.result() if hasattr(client, "result") else client


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    """Return a datum that predicts each next token."""
    arrays = {name: np.asarray(values, np.float32) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.asarray(tokens[1:], np.int64),
            **{name: values for name, values in arrays.items()},
        },
    )


def logprobs(result: types.ForwardBackwardOutput) -> list[np.ndarray]:
    """Return the log-probs of each datum."""
    return [np.asarray(each["logprobs"].data, np.float32) for each in result.loss_fn_outputs]


def call(
    base_url: str,
    path: str,
    body: Any = None,
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    key: str = KEY,
) -> tuple[int, Any]:
    """Send a request without the client; return status and JSON, or text."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{base_url}/api/v1/{path}",
        data=data,
        method=method,
        headers={"X-API-Key": key, "Content-Type": "application/json"} | (headers or {}),
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        with error:
            text = error.read()
            is_json = error.headers.get_content_type() == "application/json"
            return error.code, json.loads(text) if is_json else text.decode()
