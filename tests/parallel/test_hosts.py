"""Failures of joining processes; tests/trainer has runs with joined processes."""

from __future__ import annotations

import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from areal_jax.parallel.hosts import _check_host_name, join


@pytest.fixture
def coordinator() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("joined", "missing"),
    [
        ((0, 2), "process 1, process 3"),
        ((1, 3), "process 0"),
        ((0,), "process 1, process 2, process 3"),
    ],
)
@pytest.mark.slow
def test_missing_processes_are_named_in_all_others(
    coordinator: str, joined: tuple[int, ...], missing: str
):
    with ThreadPoolExecutor() as pool:
        for error in [
            future.exception(30)
            for future in [pool.submit(join, coordinator, 4, number, 3.0) for number in joined]
        ]:
            assert isinstance(error, TimeoutError)
            assert (
                f"expected 4 trainer processes at {coordinator} within 3 s; missing: {missing}. "
                "Start" in str(error)
            )


@pytest.mark.slow
def test_untrusted_connections_are_closed_and_dead_peers_ignored(coordinator: str):
    host, port = coordinator.split(":")
    reset_on_close = struct.pack("ii", 1, 0)

    def connect(message: bytes) -> socket.socket:
        for _ in range(100):
            with suppress(ConnectionRefusedError):
                connection = socket.create_connection((host, int(port)))
                connection.sendall(message)
                return connection
            time.sleep(0.05)
        raise AssertionError(f"expected a listener at {coordinator}, found none")

    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(join, coordinator, 4, 0, 6.0)]
        connect(b"").close()
        with (
            connect(b""),
            connect(b"GET / HTTP/1.1\r\n\r\n"),
            connect(b"4\n"),
            connect(b"-1\n"),
            connect(b"\xff\n"),
        ):
            dying = connect(b"1\n")
            futures.append(pool.submit(join, coordinator, 4, 2, 6.0))
            time.sleep(3.0)
            dying.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_on_close)
            dying.close()
            for error in [future.exception(30) for future in futures]:
                assert isinstance(error, TimeoutError)
                assert "missing: process 3. Start" in str(error)


def test_coordinator_needs_host_and_port():
    with pytest.raises(ValueError, match="expected coordinator to be host:port, found 'localhost'"):
        join("localhost", 2, 1, 1.0)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("localhost", r"(127\.0\.0\.1|::1), which only this host reaches"),
        ("no host", "none"),
    ],
)
def test_unreachable_host_name_is_refused(name: str, found: str):
    with pytest.raises(
        ConnectionError, match=f"this host's name, {name}, .* found {found}; add name and address"
    ):
        _check_host_name(name, has_remote=True)


def test_loopback_name_is_accepted_on_a_single_host():
    _check_host_name("localhost", has_remote=False)
    with pytest.raises(ConnectionError, match="localhost"):
        _check_host_name("localhost", has_remote=True)
