"""A server that the tests of a module share."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from tiny_server import service, serving, write_policy

from areal_jax.api.training_server import ListeningServer


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("tinker") / "policy")


@pytest.fixture(scope="module")
def server(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ListeningServer]:
    with serving(policy, tmp_path_factory.mktemp("run")) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: ListeningServer) -> tinker.ServiceClient:
    return service(server.base_url)


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process at once: the client leaves sockets open, and threads that may abort it."""
    session = config.pluginmanager.get_plugin("session")
    if session is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(session.exitstatus))
