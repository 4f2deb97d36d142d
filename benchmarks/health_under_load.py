"""Availability of the server: latency of /health during difficult requests, and memory after each.

    python benchmarks/health_under_load.py                     # the embedded policy on a CPU
    python benchmarks/health_under_load.py --only=n,megabytes

Starts a server with default settings. While each case runs, /health is requested every 20 ms over a
separate connection. Reports the median, the 99th percentile and the maximum latency, the statuses
of the case, its duration, the number of log lines, and the server's resident memory before and
after. Appends one line to benchmarks/results/health_under_load.jsonl.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from results import append

PERIOD_S, TIMEOUT_S = 0.02, 300.0
CLOSED = "closed"


class Server:
    """A server process and its HTTP client."""

    def __init__(self, log: Path, settings: list[str]) -> None:
        given = [sys.executable, "-m", "areal_jax.serve", "port=0", "api_key=key", *settings]
        self.log = log
        self.process = subprocess.Popen(
            given, stdout=subprocess.PIPE, stderr=log.open("w"), text=True
        )
        assert self.process.stdout is not None
        found = re.search(r"http://[^:]+:(\d+)", self.process.stdout.readline())
        assert found is not None, log.read_text()
        self.port = int(found[1])

    def post(self, path: str, body: Any) -> str:
        """Send a request; return the status of the response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        headers = {"Authorization": "Bearer key", "Content-Type": "application/json"}
        try:
            connection.request(
                "POST",
                path,
                body if isinstance(body, bytes) else json.dumps(body).encode(),
                headers,
            )
            answer = connection.getresponse()
            answer.read()
            return str(answer.status)
        except (ConnectionError, http.client.HTTPException):
            return CLOSED
        finally:
            connection.close()

    def send(self, data: bytes, *, wait_s: float = 5.0) -> str:
        """Send bytes that need not be HTTP; return the status of the response."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait_s) as raw:
            try:
                raw.sendall(data)
                found = re.match(rb"HTTP/1.\d (\d+)", raw.recv(4096))
            except TimeoutError:
                return "open"
            except ConnectionError:
                return CLOSED
        return found[1].decode() if found else CLOSED

    def chat(self, **given: Any) -> str:
        return self.post(
            "/v1/chat/completions",
            {"model": "embedded", "messages": ASKED, "max_tokens": 8, **given},
        )

    def rss(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss


ASKED = [{"role": "user", "content": "What is 12 + 30?"}]
TEXT = "The quick brown fox, 12 + 30 = 42. "


def several(num: int, ask: Callable[[], str]) -> list[str]:
    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(lambda _: ask(), range(num)))


def malformed(server: Server) -> list[str]:
    begin = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n"
    sent = [
        b"\x00\x01\x02 no HTTP \xff\xfe\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"".join(b"X%d: a\r\n" % i for i in range(20_000)) + b"\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        begin + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nnot hex\r\n",
        begin + b"Content-Length: -5\r\n\r\n",
        begin + b"Content-Length: many\r\n\r\n{}",
        begin
        + b"Content-Type: application/json\r\nContent-Length: 6\r\n\r\n\xff\xfe\xff\xfe\xff\xfe",
    ]
    return [server.send(data) for data in sent * 10]


def slow(server: Server) -> list[str]:
    """Send headers and bodies byte by byte."""
    raws = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    for place, raw in enumerate(raws):
        begin = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n"
        raw.sendall(begin + (b"Content-Length: 1000\r\n\r\n{" if place % 2 else b""))
    time.sleep(3)
    for raw in raws:
        raw.close()
    return []


WATCH = """
import http.client, select, sys, time

connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
while not select.select([sys.stdin], [], [], float(sys.argv[2]))[0]:
    start = time.perf_counter()
    connection.request("GET", "/health")
    connection.getresponse().read()
    print(1e3 * (time.perf_counter() - start))
"""
"""The probe, in a separate process, so that the clients' work is not measured."""

CASES: dict[str, Callable[[Server], list[str]]] = {
    "nothing": lambda server: [time.sleep(3) or ""],
    "top_logprobs": lambda server: [server.chat(logprobs=True, top_logprobs=20)],
    "penalties": lambda server: [server.chat(presence_penalty=1.0)],
    "n": lambda server: [server.chat(n=128, max_tokens=256, min_tokens=250)],
    "n_streamed": lambda server: [server.chat(n=128, max_tokens=256, min_tokens=250, stream=True)],
    "n_stops": lambda server: [
        server.chat(n=128, max_tokens=256, min_tokens=250, stop=["never said", "nor this"])
    ],
    "n_top_logprobs": lambda server: [
        server.chat(n=128, max_tokens=256, min_tokens=250, logprobs=True, top_logprobs=20)
    ],
    "megabytes": lambda server: several(
        4, lambda: server.post("/v1/completions", {"model": "embedded", "prompt": TEXT * 110_000})
    ),
    "message_of_megabytes": lambda server: several(
        4, lambda: server.chat(messages=[{"role": "user", "content": TEXT * 110_000}])
    ),
    "messages": lambda server: [server.chat(messages=[{"role": "user", "content": ""}] * 100_000)],
    "values": lambda server: [
        server.post(
            "/v1/completions", b'{"model": "embedded", "prompt": [' + b"[]," * 1_300_000 + b"1]}"
        )
    ],
    "tokens": lambda server: [
        server.post("/v1/completions", {"model": "embedded", "prompt": [1] * 1_300_000})
    ],
    "nesting": lambda server: [server.post("/v1/completions", b'{"a":' * 600_000)],
    "tools": lambda server: [
        server.chat(
            tools=[{"type": "function", "function": {"name": "f", "description": TEXT * 110_000}}]
        )
    ],
    "stops": lambda server: [server.chat(stop=[TEXT * 7_000] * 16, max_tokens=256)],
    "logit_bias": lambda server: [server.chat(logit_bias={str(i): 1 for i in range(200_000)})],
    "clients": lambda server: several(200, server.chat),
    "malformed": malformed,
    "slow": slow,
}


def measured(server: Server, case: Callable[[Server], list[str]]) -> dict[str, Any]:
    """Request /health while a case runs."""
    before, lines_before = server.rss(), len(server.log.read_text().splitlines())
    given = [sys.executable, "-c", WATCH, str(server.port), str(PERIOD_S)]
    watching = subprocess.Popen(given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    time.sleep(0.5)
    start = time.perf_counter()
    statuses = case(server)
    seconds = time.perf_counter() - start
    time.sleep(0.5)
    said, _ = watching.communicate("")
    took_ms = [float(line) for line in said.split()]
    return {
        "p50_ms": round(float(np.percentile(took_ms, 50)), 1),
        "p99_ms": round(float(np.percentile(took_ms, 99)), 1),
        "max_ms": round(max(took_ms), 1),
        "asked": len(took_ms),
        "seconds": round(seconds, 1),
        "statuses": dict(Counter(statuses)),
        "log_lines": len(server.log.read_text().splitlines()) - lines_before,
        "rss_mib": [before >> 20, server.rss() >> 20],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("settings", nargs="*", help="of the server")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "log", given.settings)
        try:
            cases = {}
            for name in given.only.split(","):
                cases[name] = measured(server, CASES[name])
                print(name, json.dumps(cases[name]), flush=True)
        finally:
            server.process.terminate()
            returncode = server.process.wait(120)
        append(
            "health_under_load",
            {"settings": given.settings, "returncode": returncode, "cases": cases},
        )


if __name__ == "__main__":
    main()
