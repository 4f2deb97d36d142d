"""More samplers than places in the engines: who waits, and for how long."""

# pyright: reportMissingImports=false
from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tinker import types
from tiny_server import service, serving

from areal_jax.api.training_server import ListeningServer
from areal_jax.tinker.engine_pool import EnginePool

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")

PROMPT = types.ModelInput.from_ints([5, 6, 7])
SHORT = types.SamplingParams(max_tokens=2, seed=1, stop=[])
LONG = types.SamplingParams(max_tokens=960, seed=1, stop=[])


@pytest.fixture(scope="module")
def server(
    policy: Path, tmp_path_factory: pytest.TempPathFactory, quick_compilation: None
) -> Iterator[ListeningServer]:
    # Two places: of the base and of one adapter, or of two adapters.
    given = "engine.max_new_tokens=960", "limits.max_adapters=2", "limits.max_engines=1"
    with serving(policy, tmp_path_factory.mktemp("run"), *given) as found:
        yield found


def samplers(server: ListeningServer) -> list[Any]:
    """Return samplers of three adapters, each of a client of its own, and one of the base."""
    found = list[Any]()
    for seed in range(3):
        client = service(server.base_url)
        training = client.create_lora_training_client(server.model, 4, seed=seed).result()
        found.append(training.save_weights_and_get_sampling_client().result())
    base = service(server.base_url).create_sampling_client(base_model=server.model)
    return [*found, base.result()]


@pytest.mark.slow
def test_only_requests_of_a_waiting_adapter_wait(server: ListeningServer) -> None:
    first, second, _, base = samplers(server)
    base.sample(PROMPT, 1, SHORT).result()
    running = [sampler.sample(PROMPT, 1, LONG) for sampler in (first, base)]
    first.sample(PROMPT, 1, SHORT).result()
    # More than the turns of all requests that run at the same time.
    waiting = [second.sample(PROMPT, 4, SHORT) for _ in range(4)]
    for sampler in (first, base, first, base):
        sampler.sample(PROMPT, 1, SHORT).result(30)
    assert not any(each.done() for each in running), "the long requests ended too early"
    assert not any(each.done() for each in waiting)
    assert [len(each.result(60).sequences) for each in waiting] == [4] * 4


@pytest.mark.slow
def test_an_adapter_gets_a_place_that_others_use_all_the_time(
    server: ListeningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved, reserve = list[bool](), EnginePool._reserve

    def recorded(self: EnginePool, path: str, shape: Any) -> bool:
        reserved.append(reserve(self, path, shape))
        return reserved[-1]

    monkeypatch.setattr(EnginePool, "_reserve", recorded)
    one, two, late, _ = samplers(server)
    stop, ended = threading.Event(), {one: 0, two: 0}

    def sample_always(sampler: Any) -> None:
        params = types.SamplingParams(max_tokens=200, seed=1, stop=[])
        futures = [sampler.sample(PROMPT, 1, params) for _ in range(2)]
        while not stop.is_set():
            futures.append(sampler.sample(PROMPT, 1, params))
            futures.pop(0).result(60)
            ended[sampler] += 1

    threads = [threading.Thread(target=sample_always, args=(each,)) for each in (one, two)]
    for thread in threads:
        thread.start()
    try:
        while not all(ended.values()):
            stop.wait(0.01)
        before = dict(ended)
        assert len(late.sample(PROMPT, 1, SHORT).result(60).sequences) == 1
        after = dict(ended)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    # Both went on meanwhile; then one of them had to leave its place.
    assert all(after[each] > before[each] for each in ended)
    assert any(reserved)
