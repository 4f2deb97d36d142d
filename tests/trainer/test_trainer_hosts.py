"""Laws of training in several processes: they find what one process finds, and resume from each
other's checkpoints."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import trainer_host
from safetensors.numpy import load_file
from tiny_training import POLICY

from areal_jax.models import hf
from areal_jax.parallel.mesh import make_train_mesh
from areal_jax.parallel.sharding import TRAIN_RULES, shardings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

TIMEOUT_S = 500
NUM_PROCESSES, DEVICES_EACH = 2, 2


class Ran(NamedTuple):
    """What one process with four devices found, and what two with two each found."""

    folder: Path
    alone: list[dict[str, float]]
    together: list[dict[str, Any]]
    """Of each process."""
    again: dict[str, float]
    """What one process found that went on from a checkpoint of two."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, of_a_command: dict[str, str]) -> Ran:
    folder = tmp_path_factory.mktemp("hosts")
    for name in ("alone", "together"):
        (folder / name).mkdir()
    mesh = make_train_mesh(trainer_host.PLACEMENT, jax.devices()[: NUM_PROCESSES * DEVICES_EACH])
    trainer_host.write_adapted(mesh, folder / "alone")
    trainer = trainer_host.make(mesh)
    alone = trainer_host.train(trainer, folder / "alone")
    together = in_processes(of_a_command, folder / "together", folder / "alone" / "checkpoints")
    return Ran(
        folder, alone, together, trainer_host.go_on(trainer, folder / "together" / "checkpoints")
    )


def in_processes(
    environment: dict[str, str], folder: Path, checkpoints: Path
) -> list[dict[str, Any]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    flags = {
        "XLA_FLAGS": (
            f"{environment['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES_EACH}"
        ),
        "NPROC": str(4 * DEVICES_EACH),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, trainer_host.__file__, coordinator, str(NUM_PROCESSES)]
    processes = [
        subprocess.Popen(
            [*command, str(number), str(folder), str(checkpoints)],
            env=environment | flags,
            stderr=subprocess.PIPE,
        )
        for number in range(NUM_PROCESSES)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, errors.decode()[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [
        json.loads((folder / f"found-{number}.json").read_text()) for number in range(NUM_PROCESSES)
    ]


def without_digest(metrics: dict[str, float]) -> dict[str, float]:
    """All but the checksum of parameters, which any rounding changes."""
    return {name: value for name, value in metrics.items() if name != "params_digest"}


def test_several_processes_find_what_one_finds(ran: Ran):
    first, second = (found["steps"] for found in ran.together)
    assert first == second
    for alone, together in zip(ran.alone, first, strict=True):
        # Sums over four devices in another order: a few roundings of float32 (6e-8), which Adam's
        # first steps, of the size of the learning rate wherever a gradient is not zero, carry into
        # all that follows.
        assert without_digest(together) == pytest.approx(without_digest(alone), rel=2e-4, abs=1e-6)
        assert together["loss"] != 0.0 and together["value_loss"] > 0.0


def test_several_processes_end_with_the_parameters_of_one(ran: Ran):
    with (
        np.load(ran.folder / "alone" / "state.npz") as alone,
        np.load(ran.folder / "together" / "state.npz") as together,
    ):
        assert len(alone) == len(together) > 50
        for name in alone:
            np.testing.assert_allclose(together[name], alone[name], rtol=1e-3, atol=2e-5)


def test_checkpoints_are_shared_by_one_and_several_hosts(ran: Ran):
    again, other = (found["again"] for found in ran.together)
    assert again == other
    expected = without_digest(ran.alone[1])
    assert without_digest(again) == pytest.approx(expected, rel=2e-4, abs=1e-6)
    expected = without_digest(ran.together[0]["steps"][1])
    assert without_digest(ran.again) == pytest.approx(expected, rel=2e-4, abs=1e-6)


def test_files_of_several_processes_are_read_back(ran: Ran):
    mesh = make_train_mesh(trainer_host.PLACEMENT, jax.devices()[:2])
    read = hf.load(
        ran.folder / "together" / "policy",
        POLICY,
        shardings(mesh, POLICY.axes(), POLICY.abstract(), TRAIN_RULES),
    )
    with np.load(ran.folder / "together" / "state.npz") as state:
        # A state begins with the parameters.
        for i, leaf in enumerate(jax.tree.leaves(read)):
            np.testing.assert_array_equal(np.asarray(leaf), state[f"arr_{i}"])


@pytest.mark.parametrize("name", ["adapter/adapter_model.safetensors", "merged/model.safetensors"])
def test_several_hosts_export_and_publish_the_adapter_of_one(ran: Ran, name: str):
    alone, together = (load_file(ran.folder / which / name) for which in ("alone", "together"))
    assert alone.keys() == together.keys()
    for tensor in alone:
        # A product of two ranks; whoever sums them, one rounding of float32.
        np.testing.assert_allclose(together[tensor], alone[tensor], rtol=1e-6, atol=1e-6)
