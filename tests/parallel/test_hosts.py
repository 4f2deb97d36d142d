"""Laws of joining processes: who is missing is named, in all that came. Those that all came are in tests/trainer."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from areal_jax.parallel.hosts import _require_name, join


@pytest.fixture
def coordinator() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("came", "missing"), [((0, 2), "process 1, process 3"), ((1, 3), "process 0"), ((0,), "process 1, process 2, process 3")]
)
def test_all_that_came_are_told_who_is_missing(coordinator: str, came: tuple[int, ...], missing: str):
    with ThreadPoolExecutor() as pool:
        for error in [future.exception(30) for future in [pool.submit(join, coordinator, 4, number, 3.0) for number in came]]:
            assert isinstance(error, TimeoutError)
            assert f"for 4 trainer processes; missing: {missing}. Start" in str(error)


def test_where_the_coordinator_answers_must_be_said_whole():
    with pytest.raises(ValueError, match="expected host:port"):
        join("localhost", 2, 1, 1.0)


@pytest.mark.parametrize(
    ("name", "leads"), [("localhost", r"leads to (127\.0\.0\.1|::1), where only this host comes"), ("no host", "leads nowhere")]
)
def test_a_host_that_others_cannot_find_by_its_name_is_told_what_to_do(name: str, leads: str):
    with pytest.raises(ConnectionError, match=f"this host's name, {name}, {leads}.* write name and address"):
        _require_name(name, are_apart=True)


def test_on_one_machine_no_other_has_to_find_it():
    _require_name("localhost", are_apart=False)
