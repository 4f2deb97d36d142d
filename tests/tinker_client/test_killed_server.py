"""A server that is killed: clients go on, get the answers once computed, and nothing twice."""

# pyright: reportMissingImports=false
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker import types
from tiny_server import Process, call, datum, logprobs, process, service

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")

ADAM = types.AdamParams(learning_rate=1e-2)
PARAMS = types.SamplingParams(max_tokens=40, seed=3, stop=[])
PROMPT = types.ModelInput.from_ints([5, 6, 7])
BATCHES = [np.random.default_rng(i).integers(3, 400, (3, 9)).tolist() for i in range(6)]


def step(training: Any, batch: list[list[int]]) -> tuple[Any, Any]:
    future = training.forward_backward([datum(t) for t in batch], "cross_entropy")
    return future, training.optim_step(ADAM)


def new_model(server: Process) -> Any:
    client = service(server.base_url)
    return client.create_lora_training_client(base_model=server.model, rank=4, seed=1).result()


def sample(training: Any) -> list[list[int]]:
    sampler = training.save_weights_and_get_sampling_client()
    return [each.tokens for each in sampler.sample(PROMPT, 2, PARAMS).result().sequences]


@pytest.fixture(scope="module")
def undisturbed(
    policy: Path, tmp_path_factory: pytest.TempPathFactory, of_a_command: dict[str, str]
) -> tuple[list[Any], int]:
    """Outputs of six steps and a sample, and the port that the server had."""
    found = list[Any]()
    with process(policy, tmp_path_factory.mktemp("calm"), of_a_command) as server:
        training = new_model(server)
        for batch in BATCHES[:3]:
            first, second = step(training, batch)
            found += [logprobs(first.result()), second.result().metrics]
        found += sample(training)
        for batch in BATCHES[3:]:
            first, second = step(training, batch)
            found += [logprobs(first.result()), second.result().metrics]
        return found + sample(training), int(server.base_url.rpartition(":")[2])


@pytest.mark.timeout(240)
def test_a_killed_server_resumes_bit_for_bit(
    policy: Path,
    tmp_path: Path,
    of_a_command: dict[str, str],
    undisturbed: tuple[list[Any], int],
) -> None:
    # There is a snapshot of the first step only, so that the others are computed again.
    found, (expected, port) = list[Any](), undisturbed
    period = "limits.snapshot_period_s=1000"
    with process(policy, tmp_path, of_a_command, period, port=port) as server:
        training = new_model(server)
        for batch in BATCHES[:3]:
            first, second = step(training, batch)
            found += [logprobs(first.result()), second.result().metrics]
        # Samples and operations under way, and gradients without their step.
        sampler = training.save_weights_and_get_sampling_client().result()
        samples = sampler.sample(PROMPT, 2, PARAMS)
        pending = [step(training, BATCHES[3])]
        pending[0][0].result()
        pending.append(step(training, BATCHES[4]))
        server.kill()
    # With snapshots of every step from now on, of which the last one is kept.
    period = "limits.snapshot_period_s=0"
    with process(policy, tmp_path, of_a_command, period, port=port) as server:
        found += [each.tokens for each in samples.result().sequences]
        for first, second in (*pending, step(training, BATCHES[5])):
            found += [logprobs(first.result()), second.result().metrics]
        found += sample(training)
        # A result of before is retrieved again, and its operation is not applied again.
        request = {"request_id": f"{training.model_id}:2"}
        assert call(server.base_url, "retrieve_future", request)[1]["metrics"] == found[1]
    assert repr(found) == repr(expected)
    # Snapshots that the journal does not name are deleted.
    assert len(list((tmp_path / "snapshots").glob("*/*"))) == 1
