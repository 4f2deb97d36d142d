"""Laws of joining processes: who is missing is named, in all that came. Those that all came are in
tests/trainer."""

from __future__ import annotations

import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from areal_jax.parallel.hosts import _require_name, join


@pytest.fixture
def coordinator() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("came", "missing"),
    [
        ((0, 2), "process 1, process 3"),
        ((1, 3), "process 0"),
        ((0,), "process 1, process 2, process 3"),
    ],
)
def test_all_that_came_are_told_who_is_missing(
    coordinator: str, came: tuple[int, ...], missing: str
):
    with ThreadPoolExecutor() as pool:
        for error in [
            future.exception(30)
            for future in [pool.submit(join, coordinator, 4, number, 3.0) for number in came]
        ]:
            assert isinstance(error, TimeoutError)
            assert f"for 4 trainer processes; missing: {missing}. Start" in str(error)


def test_who_else_comes_to_the_port_is_sent_away_and_who_dies_is_not_waited_for(coordinator: str):
    host, port = coordinator.split(":")
    at_once = struct.pack("ii", 1, 0)  # closing is a reset, which whoever answers then meets

    def visit(said: bytes) -> socket.socket:
        for _ in range(100):
            with suppress(ConnectionRefusedError):
                visitor = socket.create_connection((host, int(port)))
                visitor.sendall(said)
                return visitor
            time.sleep(0.05)
        raise AssertionError("nobody listens")

    with ThreadPoolExecutor() as pool:
        coming = [pool.submit(join, coordinator, 4, 0, 6.0)]
        visit(b"").close()
        with (
            visit(b""),
            visit(b"GET / HTTP/1.1\r\n\r\n"),
            visit(b"4\n"),
            visit(b"-1\n"),
            visit(b"\xff\n"),
        ):
            dying = visit(b"1\n")
            coming.append(pool.submit(join, coordinator, 4, 2, 6.0))
            time.sleep(3.0)
            dying.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            dying.close()
            for error in [future.exception(30) for future in coming]:
                assert isinstance(error, TimeoutError)
                assert "missing: process 3. Start" in str(error)


def test_where_the_coordinator_answers_must_be_said_whole():
    with pytest.raises(ValueError, match="expected host:port"):
        join("localhost", 2, 1, 1.0)


@pytest.mark.parametrize(
    ("name", "leads"),
    [
        ("localhost", r"leads to (127\.0\.0\.1|::1), where only this host comes"),
        ("no host", "leads nowhere"),
    ],
)
def test_a_host_that_others_cannot_find_by_its_name_is_told_what_to_do(name: str, leads: str):
    with pytest.raises(
        ConnectionError, match=f"this host's name, {name}, {leads}.* write name and address"
    ):
        _require_name(name, are_apart=True)


def test_on_one_machine_no_other_has_to_find_it():
    _require_name("localhost", are_apart=False)
