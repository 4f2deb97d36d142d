"""Trainer hosts: processes joined by jax.distributed, whose devices are one mesh."""

from __future__ import annotations

import math
import os
import socket
import time
from contextlib import ExitStack, suppress
from ipaddress import ip_address

import jax

LEAVE_TIMEOUT_S = 60
"""So long a process that ends waits for the others to end too."""

_NOBODY = "nobody"
_NAP_S = 0.2
_MAX_CHARS = 10_000
_HEAR_S = 2.0
"""What a process gets to say its number, once it is connected."""
_TELL_S = 10.0
"""What process 0 gets to tell the others, once its wait is over."""
_LEAST_S = 30.0
"""What jax gets to connect processes that are all there."""


def join(coordinator: str, num_processes: int, process_id: int, timeout_s: float) -> None:
    """Make this process one of several; afterwards `jax.devices()` are those of all. Before
    anything uses a device.

    Every process calls it, and from then on runs the same programs in the same order.

    Args:
        coordinator: host:port at which process 0 answers the others.
        process_id: from 0; devices are numbered in its order.

    Raises TimeoutError, in all that came, which names the processes that did not come in time, and
    ConnectionError where the others could not reach this host by its name."""
    deadline_s = time.monotonic() + timeout_s
    # jax itself would not raise where one is missing, but end the process.
    if process_id == 0:
        missing, are_apart = _await_others(coordinator, num_processes, deadline_s)
    else:
        missing, are_apart = _report(coordinator, process_id, deadline_s, timeout_s)
    if missing:
        raise TimeoutError(
            f"waited {timeout_s:g} s at {coordinator} for {num_processes} trainer processes; "
            f"missing: {missing}. Start them "
            "with the same coordinator and number of processes, and see whether they can reach it"
        )
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        _require_name(socket.gethostname(), are_apart=are_apart)
    # CPUs have no way of their own to talk to each other; other platforms do not read this.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        initialization_timeout=math.ceil(max(_LEAST_S, deadline_s - time.monotonic())),
        shutdown_timeout_seconds=LEAVE_TIMEOUT_S,
        cluster_detection_method="deactivate",
    )


def _await_others(coordinator: str, num_processes: int, deadline_s: float) -> tuple[str, bool]:
    """Process 0: let all others come and tell each of them who is missing; nobody, if all goes
    well. And whether some of them are on other hosts."""
    host, port = _address(coordinator)
    with ExitStack() as stack:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server = stack.enter_context(socket.create_server(("", port), family=family))
        arrived: dict[int, socket.socket] = {}
        are_apart = False
        while len(arrived) < num_processes - 1 and (left_s := deadline_s - time.monotonic()) > 0:
            server.settimeout(left_s)
            # Anybody may come to a port. Who goes at once, or says nothing or something else, is
            # sent away.
            with suppress(OSError, ValueError):
                connection, _peer = server.accept()
                connection.settimeout(min(left_s, _HEAR_S))
                with ExitStack() as until_known:
                    until_known.callback(connection.close)
                    number = int(_line(connection))
                    if 0 < number < num_processes:
                        are_apart |= _are_apart(connection)
                        arrived[number] = stack.enter_context(connection)
                        until_known.pop_all()
        missing = ", ".join(
            f"process {number}" for number in range(1, num_processes) if number not in arrived
        )
        for connection in arrived.values():
            with suppress(OSError):  # it has gone meanwhile
                connection.sendall(f"{missing or _NOBODY}\n".encode())
    return missing, are_apart


def _report(
    coordinator: str, process_id: int, deadline_s: float, timeout_s: float
) -> tuple[str, bool]:
    """Any other process: come to process 0 and be told who is missing. And whether that is on
    another host."""
    while (left_s := deadline_s - time.monotonic()) > 0:
        # Where that fails, it does not listen yet, or has gone.
        with (
            suppress(OSError),
            socket.create_connection(_address(coordinator), timeout=left_s) as connection,
        ):
            connection.sendall(f"{process_id}\n".encode())
            # Process 0 may have begun to wait only now; it waits as long, and tells all only then.
            connection.settimeout(timeout_s + _TELL_S)
            if reported := _line(connection):
                return "" if reported == _NOBODY else reported, _are_apart(connection)
        time.sleep(_NAP_S)
    return "process 0", False


def _are_apart(connection: socket.socket) -> bool:
    """Whether its ends are on different hosts."""
    return connection.getsockname()[0] != connection.getpeername()[0]


def _require_name(name: str, *, are_apart: bool) -> None:
    """CPUs talk to each other by gloo, which listens where its host's name leads.

    Args: are_apart: other hosts have to come there."""
    try:
        found = ip_address(socket.getaddrinfo(name, None)[0][4][0])
    except socket.gaierror:
        found = None
    if found is None or (are_apart and found.is_loopback):
        leads = f"leads to {found}, where only this host comes" if found else "leads nowhere"
        raise ConnectionError(
            f"this host's name, {name}, {leads}; by their names CPUs of several trainer hosts "
            "find each other: write name and "
            "address of each host into /etc/hosts, or into what else resolves names"
        )


def _line(connection: socket.socket) -> str:
    with connection.makefile() as file:
        return file.readline(_MAX_CHARS).strip()


def _address(coordinator: str) -> tuple[str, int]:
    host, separator, port = coordinator.rpartition(":")
    if not separator or not port.isdigit():
        raise ValueError(f"coordinator={coordinator!r}: expected host:port")
    return host, int(port)
