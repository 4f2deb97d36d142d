"""A run on two nodes with a fast, a slow and a partitioned network.

    sudo python benchmarks/two_nodes.py

Needs Linux, root, `ip` and `tc` (iproute2), and the extra `ray`. The nodes are namespaces of this
machine, each with its own network interface, address, processes and shared memory, connected by TCP
over a bridge. Each node starts the commands of `deploy/slurm.sh`. The embedded policy trains and
uses both CPUs of every node:

    fast        1 trainer host, 2 engines, 1 reward worker
    slow        the same with 20 Mbit/s each way, so that a weight update takes 1.4 s
    two hosts   2 trainer hosts, whose gradients cross the network if they are on different nodes;
                1 engine, 1 reward worker
    cut         as fast, but the network is partitioned during the run until the second node is
                declared dead; then it is restored, and the node joins again

Reports answers per second from the first step on and bytes over the network; for `cut` the time
until a death was detected, the steps made meanwhile, the time from the node's return to the next
step, and the workers that died. Checks the invariants of `worker_deaths.py`. Appends to
results/two_nodes.jsonl. Takes about 9 minutes.

Expected: a slow network costs little, because weight updates are asynchronous; Ray's heartbeats
detect the partition in about 75 s.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from results import append
from rich.console import Console
from rich.table import Table
from runs import read, steps
from worker_deaths import checked, reinforcement

NAME = "two_nodes"
BRIDGE, ADDRESSES = "areal0", ("10.213.0.1", "10.213.0.2")
CUT_AT_VERSION, TIMEOUT_S = 15, 600.0


@dataclass(frozen=True)
class Variant:
    trainer_hosts: int = 1
    rollout_engines: int = 2
    shaping: str = ""
    """Traffic shaping by `tc`, in both directions."""
    is_cut: bool = False


VARIANTS = {
    "fast": Variant(),
    "slow": Variant(shaping="tbf rate 20mbit burst 256kb latency 400ms"),
    "two hosts": Variant(trainer_hosts=2, rollout_engines=1),
    "cut": Variant(is_cut=True),
}


def do(command: str) -> None:
    subprocess.run(command.split(), check=True)


@contextmanager
def network(shaping: str) -> Iterator[None]:
    """Create a bridge with a link to each of two namespaces."""
    do(f"ip link add {BRIDGE} type bridge")
    do(f"ip link set {BRIDGE} up")
    try:
        for number, address in enumerate(ADDRESSES):
            do(f"ip netns add areal{number}")
            do(f"ip link add areal-v{number} type veth peer name eth0 netns areal{number}")
            do(f"ip link set areal-v{number} master {BRIDGE} up")
            do(f"ip -n areal{number} addr add {address}/24 dev eth0")
            for name in ("lo", "eth0"):
                do(f"ip -n areal{number} link set {name} up")
            if shaping:
                do(f"tc qdisc add dev areal-v{number} root {shaping}")
        yield
    finally:
        for number in range(len(ADDRESSES)):
            subprocess.run(["ip", "netns", "delete", f"areal{number}"], check=False)
        do(f"ip link delete {BRIDGE}")


@contextmanager
def node(
    number: int, settings: Sequence[str], token: str, log: TextIO
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the processes of a node, which all end with it."""
    apart = ("--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    names = "".join(f"{address} node{place}\\n" for place, address in enumerate(ADDRESSES))
    own = " && ".join(
        (
            *(
                f"hostname node{number}",
                "mkdir -p /tmp/ray",
                "mount -t tmpfs tmpfs /tmp/ray",
                "mount -t tmpfs tmpfs /dev/shm",
            ),
            *(
                f"printf '127.0.0.1 localhost\\n{names}' >/tmp/ray/hosts",
                "mount --bind /tmp/ray/hosts /etc/hosts",
            ),
        )
    )
    enter = (
        "nsenter",
        f"--net=/run/netns/areal{number}",
        "unshare",
        *apart,
        "bash",
        "-c",
        f'{own} && exec "$@"',
        "-",
    )
    address, programs = f"{ADDRESSES[0]}:6379", Path(sys.executable).parent
    ray = (
        str(programs / "ray"),
        "symmetric-run",
        f"--address={address}",
        "--min-nodes=2",
        "--num-cpus=2",
        "--",
    )
    train = (
        sys.executable,
        "-m",
        "areal_jax.train",
        "launch=ray",
        f"launch.address={address}",
        *settings,
    )
    process = subprocess.Popen(
        [*enter, *ray, *train],
        env=os.environ
        | {"PATH": f"{programs}:{os.environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
        | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def train(variant: Variant, settings: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run the training; return the network traffic and the effect of a partition.

    Raises:
        SystemExit: the run fails.
    """
    token, found = secrets.token_hex(32), dict[str, Any]()
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    with (
        network(variant.shaping),
        log.open("w") as reported,
        folder.with_suffix(".other.log").open("w") as other,
        node(0, settings, token, reported) as first,
    ):
        with node(1, settings, token, other):
            if variant.is_cut:
                wait(
                    first, f"version {CUT_AT_VERSION}", lambda: version_of(folder) >= CUT_AT_VERSION
                )
                do("ip link set areal-v1 down")
                cut_s, version = time.monotonic(), version_of(folder)
                wait(first, "a worker's death", lambda: "worker died" in log.read_text())
                found |= {
                    "seconds_until_detected": time.monotonic() - cut_s,
                    "steps_meanwhile": version_of(folder) - version,
                }
            else:
                wait(first, "the end", lambda: first.poll() is not None)
        if variant.is_cut:
            do("ip link set areal-v1 up")
            back_s, version = time.monotonic(), version_of(folder)
            with node(1, settings, token, other):
                wait(first, "the next step", lambda: version_of(folder) > version)
                found["seconds_until_next_step"] = time.monotonic() - back_s
                wait(first, "the end", lambda: first.poll() is not None)
        found["network_bytes"] = sum(
            int(Path(f"/sys/class/net/areal-v1/statistics/{way}_bytes").read_text())
            for way in ("rx", "tx")
        )
    found["lost"] = re.findall(
        r"^\w+:areal_jax\.cluster\.\w+:worker died: (.+?) died", log.read_text(), re.MULTILINE
    )
    if first.returncode:
        raise SystemExit(f"the run exited with status {first.returncode}; see {log}")
    return found


def wait(process: subprocess.Popen[bytes], what: str, holds: Callable[[], bool]) -> None:
    """Wait until a condition holds.

    Raises:
        SystemExit: the process ends or the time is over first.
    """
    began_s = time.monotonic()
    while not holds():
        if process.poll() is not None or time.monotonic() - began_s > TIMEOUT_S:
            raise SystemExit(
                f"waited {time.monotonic() - began_s:.0f} s for {what}; the run's exit status is "
                f"{process.poll()}"
            )
        time.sleep(0.2)


def version_of(folder: Path) -> int:
    """Return the version of the last recorded trainer step; -1 if there is none."""
    return (
        max((int(row["version"]) for row in steps(read(folder))), default=-1)
        if (folder / "metrics.jsonl").exists()
        else -1
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs") / NAME, help="of the runs")
    parser.add_argument("--steps", type=int, default=40, help="trainer steps per run")
    parser.add_argument(
        "--note", default="", help="note for the row, such as other load of the machine"
    )
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for name, variant in VARIANTS.items():
        settings = (
            *(
                "launch=ray",
                "launch.accelerator=none",
                f"launch.trainer_hosts={variant.trainer_hosts}",
            ),
            *(
                f"launch.rollout_engines={variant.rollout_engines}",
                "launch.reward_workers=1",
                f"num_steps={options.steps}",
            ),
            *("evaluation.every_steps=20", "evaluation.num_tasks=256", "checkpoint.every_steps=5"),
        )
        folder = options.folder / name.replace(" ", "-")
        network_cost = train(
            variant, ("--exp=aime", f"--run-folder={folder.absolute()}", *settings[1:]), folder
        )
        found[name] = checked(folder, reinforcement("aime", settings)) | network_cost
        print(f"{name}: {found[name]}", flush=True)
    append(NAME, {"note": options.note, "steps": options.steps, "runs": found})
    table = Table("network", "pass@1", "answers/s", "MB over it", "lost", title=NAME)
    for name, each in found.items():
        curve = " -> ".join(f"{score:.1%}" for _, score in each["pass_at_1"])
        table.add_row(
            name,
            curve,
            f"{each['samples_per_s']:.0f}",
            f"{each['network_bytes'] / 1e6:.0f}",
            ", ".join(each["lost"]),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
