"""More samplers than places in the engines: who waits, and for how long."""

# pyright: reportMissingImports=false
from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
# Of different lengths, so that requests do not end together.
LONG = [types.SamplingParams(max_tokens=900 - 300 * i, seed=1, stop=[]) for i in range(3)]


@pytest.fixture(scope="module")
def pools() -> Iterator[list[EnginePool]]:
    """Collect the engines of servers that start in this process."""
    found = list[EnginePool]()

    def make(*arguments: Any) -> EnginePool:
        found.append(EnginePool(*arguments))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("areal_jax.run.training_service.EnginePool", make)
        yield found


@pytest.fixture(scope="module")
def server(
    policy: Path,
    tmp_path_factory: pytest.TempPathFactory,
    pools: list[EnginePool],
) -> Iterator[ListeningServer]:
    with serving(
        policy, tmp_path_factory.mktemp("run"), "limits.max_adapters=1", "engine.max_new_tokens=900"
    ) as found:
        yield found


def samplers(server: ListeningServer) -> list[Any]:
    """Return samplers of the base, and of two adapters, each of a client of its own.

    The base has an engine of its own rank, and the adapters one place in another.
    """
    base = service(server.base_url).create_sampling_client(base_model=server.model).result()
    base.sample(PROMPT, 1, SHORT).result()
    found = [base]
    for seed in range(2):
        client = service(server.base_url)
        training = client.create_lora_training_client(server.model, 4, seed=seed).result()
        found.append(training.save_weights_and_get_sampling_client().result())
    return found


@contextmanager
def always_sampling(*samplers: Any) -> Iterator[dict[Any, int]]:
    """Keep three requests of each sampler under way; yields how many of each have ended."""
    stop, ended = threading.Event(), dict.fromkeys(samplers, 0)

    def sample(sampler: Any) -> None:
        futures = [sampler.sample(PROMPT, 1, each) for each in LONG]
        while not stop.is_set():
            futures.append(sampler.sample(PROMPT, 1, LONG[ended[sampler] % 3]))
            futures.pop(0).result(60)
            ended[sampler] += 1

    threads = [threading.Thread(target=sample, args=(each,)) for each in samplers]
    for thread in threads:
        thread.start()
    try:
        end_s = time.monotonic() + 60
        while min(ended.values()) < 2:
            assert time.monotonic() < end_s
            stop.wait(0.01)
        yield ended
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


@pytest.mark.slow
def test_only_requests_of_a_waiting_adapter_wait(
    server: ListeningServer, pools: list[EnginePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It waits until the place is free, however slow the machine is.
    monkeypatch.setattr(pools[0], "patience_s", 600.0)
    base, first, second = samplers(server)
    with always_sampling(first, base):
        # More samples than may run at the same time.
        waiting = [second.sample(PROMPT, 1, SHORT) for _ in range(12)]
        for sampler in (first, base, first, base):
            sampler.sample(PROMPT, 1, SHORT).result(60)
            assert not any(each.done() for each in waiting)
    assert [len(each.result(60).sequences) for each in waiting] == [1] * 12


@pytest.mark.slow
def test_an_adapter_gets_a_place_that_others_use_all_the_time(server: ListeningServer) -> None:
    _, busy, late = samplers(server)
    with always_sampling(busy) as ended:
        before = ended[busy]
        assert len(late.sample(PROMPT, 1, SHORT).result(60).sequences) == 1
        # It went on meanwhile, and gets the place again.
        after, end_s = ended[busy], time.monotonic() + 60
        assert after > before
        while ended[busy] < after + 4:
            assert time.monotonic() < end_s
            time.sleep(0.01)


@pytest.mark.slow
def test_the_base_shares_the_only_engine(
    policy: Path, tmp_path: Path, pools: list[EnginePool]
) -> None:
    with serving(policy, tmp_path, "limits.max_engines=1") as server:
        base, adapter, _ = samplers(server)
        adapter.sample(PROMPT, 1, SHORT).result(60)
        (engine,) = pools[-1]._engines
        for sampler in (base, adapter, base):
            sampler.sample(PROMPT, 1, SHORT).result(60)
        assert pools[-1]._engines == [engine]
