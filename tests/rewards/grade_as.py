"""Grader programs as another user: `python grade_as.py UID SETTINGS`. For each line {"answer",
"text"} a grade is printed.

Root can become any user. What Python needs may lie below folders that are closed to others, such as
/root: in a mount namespace of its own, such a folder holds nothing but that.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import asdict
from pathlib import Path

from areal_jax.data.code_tasks import parse_tests
from areal_jax.rewards.code_grader import CodeGrader
from areal_jax.rewards.config import SandboxConfig
from areal_jax.rewards.sandbox import find_sandbox_command

CLONE_NEWNS = 0x20000


def main() -> None:
    user_id, config = int(sys.argv[1]), SandboxConfig(**json.loads(sys.argv[2]))
    if user_id != os.geteuid():
        become(user_id)
    grader = CodeGrader(config, find_sandbox_command(config), timeout_s=60.0)
    for line in sys.stdin:
        request = json.loads(line)
        print(
            json.dumps(
                asdict(grader.grade_answer(parse_tests(request["answer"]), request["text"]))
            ),
            flush=True,
        )
    grader.close()


def become(user_id: int) -> None:
    needed = [
        Path(sys.base_prefix),
        Path(sysconfig.get_path("purelib")),
        Path(__file__).resolve().parents[2],
    ]
    closed = {}
    for path in needed:
        above = [folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001]
        if above:
            closed.setdefault(above[0], []).append(path)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    mount("--make-rprivate", "/")
    for folder, paths in closed.items():
        kept = [tempfile.mkdtemp(prefix="areal_jax-") for _ in paths]
        for path, place in zip(paths, kept, strict=True):
            mount("--bind", path, place)
        mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", folder)
        for path, place in zip(paths, kept, strict=True):
            path.mkdir(parents=True)
            mount("--move", place, path)
            os.rmdir(place)
    os.setgroups([])
    os.setresgid(user_id, user_id, user_id)
    os.setresuid(user_id, user_id, user_id)


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


if __name__ == "__main__":
    main()
