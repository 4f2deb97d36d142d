"""Three tenants of one training server that is killed again and again: does each get what it would
get alone?

    python -m pip install -e ".[tinker]"
    python benchmarks/tinker_soak.py [--seconds=1800] [--kill-every=60] [--replay-seconds=1800]

Each tenant trains an adapter of the embedded policy with Tinker's client (forward_backward,
optim_step, new sampler, two samples) and cancels a sampling request now and then. SIGKILL ends the
server at intervals, and the same command starts it again; its memory is read before each kill.
Afterwards each tenant repeats its steps alone, on another server that nobody kills, for a third of
the replay's time: all log-probs, gradient norms and samples must have the same bits. Appends one
line to benchmarks/results/tinker_soak.jsonl.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import tinker
from results import append
from tinker import types

KEY, RANKS = "tml-soak", (4, 8, 8)
ADAM = types.AdamParams(learning_rate=2e-3)
PARAMS = types.SamplingParams(max_tokens=32, seed=1, stop=[])
SETTINGS = (
    *("engine.num_slots=8", "engine.max_prompt_tokens=32", "engine.max_new_tokens=32"),
    *("remat=none", "max_tokens=64", f"api_key={KEY}", "limits.snapshot_period_s=10"),
    "limits.max_resident_models=2",
)


class Server:
    """A server process on a port of its own."""

    def __init__(self, run_folder: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self._run_folder = f"http://127.0.0.1:{self.port}", run_folder
        self.start()

    def start(self) -> None:
        """Start the process, and wait until it answers."""
        given = (f"port={self.port}", f"run_folder={self._run_folder}", *SETTINGS)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "areal_jax.tinker", *given], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert "trains at" in self._process.stdout.readline()

    def rss_mib(self) -> float:
        """Return the resident memory of the process, in MiB."""
        return psutil.Process(self._process.pid).memory_info().rss / 2**20

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Tenant:
    """A client, whose steps depend on its number alone."""

    def __init__(self, url: str, number: int) -> None:
        self._url, self._number = url, number
        self._training = (
            tinker.ServiceClient(base_url=url, api_key=KEY)
            .create_lora_training_client(base_model="embedded", rank=RANKS[number], seed=number)
            .result()
        )
        self.outputs = list[dict[str, str]]()
        self.num_cancelled = 0

    def step(self, cancels: bool) -> None:
        """Make the next step; its outputs are appended."""
        rng = np.random.default_rng((self._number, len(self.outputs)))
        batch = rng.integers(3, 700, (4, 24)).tolist()
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": np.array(tokens[1:])},
            )
            for tokens in batch
        ]
        future = self._training.forward_backward(data, "cross_entropy")
        norm = self._training.optim_step(ADAM).result().metrics["grad_norm"]
        sampler = self._training.save_weights_and_get_sampling_client().result()
        sampling = sampler.sample(types.ModelInput.from_ints(batch[0]), 2, PARAMS)
        if cancels and rng.random() < 0.3:
            self._cancel_one(sampler._sampling_session_id, batch[0])
        samples = [(each.tokens, each.logprobs) for each in sampling.result().sequences]
        logprobs = [each["logprobs"].data for each in future.result().loss_fn_outputs]
        parts = {
            "grad_norm": norm,
            "tokens": [tokens for tokens, _ in samples],
            "sampled_logprobs": [logp for _, logp in samples],
            "logprobs": [list(each) for each in logprobs],
        }
        self.outputs.append({name: repr(value) for name, value in parts.items()})

    def _cancel_one(self, sampler: str, prompt: list[int]) -> None:
        """Submit another sampling request and cancel it; the server may be down."""
        body = {
            "sampling_session_id": sampler,
            "seq_id": 1_000_000,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
        }
        try:
            found = self._post("asample", body)
            self._post("cancel_future", {"request_id": found["request_id"]})
            self.num_cancelled += 1
        except OSError:
            return

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self._url}/api/v1/{path}",
            data=json.dumps(body).encode(),
            headers={"X-API-Key": KEY, "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read())


def soak(run_folder: str, seconds: float, kill_every_s: float) -> tuple[list[Tenant], list[float]]:
    """Let all tenants train while the server is killed; return them, and the server's memory before
    each kill and at the end, in MiB.
    """
    server, stop, memory = Server(run_folder), threading.Event(), list[float]()
    tenants = [Tenant(server.url, number) for number in range(len(RANKS))]

    def run(tenant: Tenant) -> None:
        while not stop.is_set():
            tenant.step(cancels=True)

    with ThreadPoolExecutor(len(tenants)) as threads:
        running = [threads.submit(run, tenant) for tenant in tenants]
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0 and not any(f.done() for f in running):
            time.sleep(min(kill_every_s, left_s))
            memory.append(server.rss_mib())
            if time.monotonic() < end_s:
                server.kill()
                server.start()
        stop.set()
        for each in running:
            each.result()
    server.kill()
    return tenants, memory


def replay(
    url: str, number: int, tenant: Tenant, seconds: float
) -> tuple[int, list[tuple[int, list[str]]]]:
    """Repeat a tenant's steps alone; return the number of steps, and those that differ with the
    names of their outputs that do.
    """
    alone, end_s = Tenant(url, number), time.monotonic() + seconds
    different = list[tuple[int, list[str]]]()
    for expected in tenant.outputs:
        if time.monotonic() > end_s:
            break
        alone.step(cancels=False)
        found = alone.outputs[-1]
        if names := [name for name in expected if found[name] != expected[name]]:
            different.append((len(alone.outputs) - 1, names))
    return len(alone.outputs), different


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--kill-every", type=float, default=60.0)
    parser.add_argument("--replay-seconds", type=float, default=1800.0)
    given = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        tenants, memory = soak(first, given.seconds, given.kill_every)
        server = Server(second)
        compared = [
            replay(server.url, number, tenant, given.replay_seconds / len(tenants))
            for number, tenant in enumerate(tenants)
        ]
        server.kill()
    num_different = sum(len(different) for _, different in compared)
    row = {
        "label": "measured",
        "seconds": given.seconds,
        "kills": len(memory) - 1,
        "steps": [len(tenant.outputs) for tenant in tenants],
        "cancelled": sum(tenant.num_cancelled for tenant in tenants),
        "compared_steps": [count for count, _ in compared],
        "different_steps": num_different,
        "differences": [different[:20] for _, different in compared],
        "server_rss_mib": [round(each) for each in memory],
    }
    append("tinker_soak", row)
    assert num_different == 0


if __name__ == "__main__":
    main()
