"""Trainer hosts: processes that jax.distributed joins, with their devices in one mesh."""

from __future__ import annotations

import math
import os
import socket
import time
from contextlib import ExitStack, suppress
from ipaddress import ip_address

import jax

LEAVE_TIMEOUT_S = 60
"""Time that a process waits for the others at its end."""

_NO_MISSING = "none"
_RETRY_S = 0.2
_MAX_CHARS = 10_000
_RECEIVE_TIMEOUT_S = 2.0
"""Time for a connected process to send its number."""
_REPLY_TIMEOUT_S = 10.0
"""Time for process 0 to send its reply, after its wait."""
_MIN_INITIALIZATION_S = 30.0
"""Minimum time for jax to connect the processes, when all of them have arrived."""


def join(coordinator: str, num_processes: int, process_id: int, timeout_s: float) -> None:
    """Join this process with others; afterwards `jax.devices()` are those of all processes.

    Every process calls this before it uses a device, and then runs the same programs in the same
    order.

    Args:
        coordinator: host:port on which process 0 listens.
        num_processes: number of processes.
        process_id: number of this process, from 0; devices are numbered in this order.
        timeout_s: time to wait for all processes.

    Raises:
        TimeoutError: in all processes, with the numbers of those that have not joined in time.
        ConnectionError: other hosts cannot reach this host by its name.
    """
    deadline_s = time.monotonic() + timeout_s
    # If a process is missing, jax itself would end this process instead of raising an error.
    if process_id == 0:
        missing, has_remote = _await_others(coordinator, num_processes, deadline_s)
    else:
        missing, has_remote = _report(coordinator, process_id, deadline_s, timeout_s)
    if missing:
        raise TimeoutError(
            f"expected {num_processes} trainer processes at {coordinator} within {timeout_s:g} s; "
            f"missing: {missing}. Start them with the same coordinator and number of processes, "
            "and check that they can reach it"
        )
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        _check_host_name(socket.gethostname(), has_remote=has_remote)
    # CPUs need an implementation of collectives; other platforms ignore this setting.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        initialization_timeout=math.ceil(max(_MIN_INITIALIZATION_S, deadline_s - time.monotonic())),
        shutdown_timeout_seconds=LEAVE_TIMEOUT_S,
        cluster_detection_method="deactivate",
    )


def _await_others(coordinator: str, num_processes: int, deadline_s: float) -> tuple[str, bool]:
    """Accept all other processes in process 0, and send them the missing ones.

    Returns:
        The missing processes as text (empty if none), and whether some are on other hosts.
    """
    host, port = _address(coordinator)
    with ExitStack() as stack:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server = stack.enter_context(socket.create_server(("", port), family=family))
        arrived: dict[int, socket.socket] = {}
        has_remote = False
        while len(arrived) < num_processes - 1 and (left_s := deadline_s - time.monotonic()) > 0:
            server.settimeout(left_s)
            # Untrusted input: connections that close, or send nothing or anything else, are closed.
            with suppress(OSError, ValueError):
                connection, _peer = server.accept()
                connection.settimeout(min(left_s, _RECEIVE_TIMEOUT_S))
                with ExitStack() as unless_known:
                    unless_known.callback(connection.close)
                    number = int(_read_line(connection))
                    if 0 < number < num_processes:
                        has_remote |= _is_remote(connection)
                        arrived[number] = stack.enter_context(connection)
                        unless_known.pop_all()
        missing = ", ".join(
            f"process {number}" for number in range(1, num_processes) if number not in arrived
        )
        for connection in arrived.values():
            with suppress(OSError):  # the process has closed the connection meanwhile
                connection.sendall(f"{missing or _NO_MISSING}\n".encode())
    return missing, has_remote


def _report(
    coordinator: str, process_id: int, deadline_s: float, timeout_s: float
) -> tuple[str, bool]:
    """Report this process to process 0, and receive the missing ones.

    Returns:
        The missing processes as text (empty if none), and whether process 0 is on another host.
    """
    while (left_s := deadline_s - time.monotonic()) > 0:
        # An error means that process 0 does not listen yet, or has closed the connection.
        with (
            suppress(OSError),
            socket.create_connection(_address(coordinator), timeout=left_s) as connection,
        ):
            connection.sendall(f"{process_id}\n".encode())
            # Process 0 may have started to wait just now, and replies only after its wait.
            connection.settimeout(timeout_s + _REPLY_TIMEOUT_S)
            if missing := _read_line(connection):
                return "" if missing == _NO_MISSING else missing, _is_remote(connection)
        time.sleep(_RETRY_S)
    return "process 0", False


def _is_remote(connection: socket.socket) -> bool:
    """Whether the ends of a connection are on different hosts."""
    return connection.getsockname()[0] != connection.getpeername()[0]


def _check_host_name(name: str, *, has_remote: bool) -> None:
    """Check that others reach this host by its name: gloo, for CPUs, listens on that address.

    Args:
        name: name of this host.
        has_remote: whether other hosts take part.

    Raises:
        ConnectionError: the name has no usable address.
    """
    try:
        address = ip_address(socket.getaddrinfo(name, None)[0][4][0])
    except socket.gaierror:
        address = None
    if address is None or (has_remote and address.is_loopback):
        found = f"{address}, which only this host reaches" if address else "none"
        raise ConnectionError(
            f"expected an address of this host's name, {name}, that other trainer hosts reach, "
            f"found {found}; add name and address of each host to DNS or /etc/hosts"
        )


def _read_line(connection: socket.socket) -> str:
    with connection.makefile() as file:
        return file.readline(_MAX_CHARS).strip()


def _address(coordinator: str) -> tuple[str, int]:
    host, separator, port = coordinator.rpartition(":")
    if not separator or not port.isdigit():
        raise ValueError(f"expected coordinator to be host:port, found {coordinator!r}")
    return host, int(port)
