"""Latency and throughput of chat completions, against the server of an earlier commit.

    git worktree add FOLDER COMMIT
    python benchmarks/chat_latency.py --before=FOLDER [--rounds=5]

Both servers decode the embedded policy with default settings and the libraries of this environment.
In each round each of them answers 40 requests of at most 16 tokens one after the other, of which
the median latency counts, whole and streamed, and then 96 requests of at most 64 tokens over 16
connections. Ratios are of this commit to the earlier one, per round. Appends one line to
benchmarks/results/chat_latency.jsonl. Needs idle cores.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from results import append

NUM_SINGLE, NUM_TOGETHER, NUM_CONNECTIONS = 40, 96, 16


@contextmanager
def serving(checkout: Path) -> Iterator[int]:
    """Run the server of a checkout; yields its port."""
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "areal_jax.serve", "port=0", "api_key=key"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout)},
        )
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline().rpartition(":")[2].split("/")[0].split()[0])
        finally:
            server.terminate()
            server.wait()


def ask(port: int, number: int, max_tokens: int, *, streams: bool = False) -> int:
    """Ask a question; return the number of tokens of the answer."""
    body = {
        "model": "embedded",
        "messages": [{"role": "user", "content": f"Compute {number}+{number + 7} modulo 9."}],
        "max_tokens": max_tokens,
        "seed": number,
        "stream": streams,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"Authorization": "Bearer key", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    assert answer.status == 200, text
    return text.count(b"data: ") if streams else json.loads(text)["usage"]["completion_tokens"]


def measure(port: int, seed: int) -> dict[str, float]:
    """Return the median latencies in seconds, and tokens per second of requests at once."""
    found = dict[str, float]()
    for name, streams in (("latency_s", False), ("streamed_latency_s", True)):
        seconds = list[float]()
        for number in range(NUM_SINGLE):
            start_s = time.perf_counter()
            ask(port, seed + number, 16, streams=streams)
            seconds.append(time.perf_counter() - start_s)
        found[name] = median(seconds)
    start_s = time.perf_counter()
    with ThreadPoolExecutor(NUM_CONNECTIONS) as threads:
        numbers = range(seed, seed + NUM_TOGETHER)
        tokens = sum(threads.map(lambda number: ask(port, number, 64), numbers))
    found["tokens_per_s"] = tokens / (time.perf_counter() - start_s)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="checkout of an earlier commit")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    here = Path(__file__).parents[1]
    commit = subprocess.run(
        ["git", "-C", given.before, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    rounds = defaultdict[str, list[dict[str, float]]](list)
    with ExitStack() as stack:
        ports = {
            name: stack.enter_context(serving(checkout.resolve()))
            for name, checkout in (("before", given.before), ("now", here))
        }
        for port in ports.values():
            measure(port, 0)  # compiles
        for turn in range(given.rounds):
            for name, port in ports.items():
                rounds[name].append(measure(port, 1000 * (turn + 1)))
    row: dict[str, Any] = {"label": "measured", "before": commit, "rounds": given.rounds}
    for key in rounds["now"][0]:
        now, before = ([each[key] for each in rounds[name]] for name in ("now", "before"))
        ratios = [a / b for a, b in zip(now, before, strict=True)]
        row[key] = {"now": median(now), "before": median(before), "ratio": median(ratios)}
        row[key] |= {"ratios": [round(ratio, 3) for ratio in ratios]}
    append("chat_latency", row)


if __name__ == "__main__":
    main()
