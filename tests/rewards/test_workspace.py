"""Workspaces: what a conversation keeps, and what its programs cannot do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from areal_jax.data.repository_files import RepositoryFile, pack_files
from areal_jax.rewards.config import SandboxConfig, ToolsConfig
from areal_jax.rewards.sandbox import find_sandbox_command
from areal_jax.rewards.workspace import Workspace, Workspaces

CONFIG = SandboxConfig(tmp_bytes=8 << 20, memory_bytes=256 << 20, max_file_bytes=1 << 20)
FIX = "<<<<<<< SEARCH\n{}\n=======\n{}\n>>>>>>> REPLACE\n"


def open_workspace(start: bytes = b"") -> Workspace:
    bwrap = find_sandbox_command(CONFIG)
    assert bwrap is not None
    return Workspace(bwrap, CONFIG, 23_456, 60.0, start)


@pytest.fixture(scope="module")
def shared() -> Iterator[Workspace]:
    workspace = open_workspace()
    yield workspace
    workspace.close()


@pytest.fixture
def workspace(shared: Workspace) -> Workspace:
    """An empty folder, in which the shell is."""
    shared.use("shell", "cd /tmp/work; chmod -R 700 .; rm -rf ./* ; pkill sleep; unset X")
    return shared


def test_files_directory_variables_and_processes_are_kept(workspace: Workspace):
    use = workspace.use
    assert use("shell", "mkdir a; cd a; export X=7; echo hi > f; pwd") == ("done", "/tmp/work/a\n")
    assert use("shell", "pwd; echo $X; cat f; false") == (
        "done",
        "/tmp/work/a\n7\nhi\n\n[exit code 1]",
    )
    assert use("python", "print(open('f').read() + 'x')") == ("done", "hi\nx\n")
    use("shell", "(while true; do date +%s%N >> ticks; sleep 0.02; done) & echo started")
    use("shell", "sleep 0.1")
    before = int(use("shell", "wc -l < ticks")[1])
    # Between two calls the processes stand still.
    time.sleep(0.5)
    assert 0 < before <= int(use("shell", "wc -l < ticks")[1]) < before + 10
    assert use("shell", "kill %1 2>/dev/null; pkill -f ticks; pkill sleep; echo ok")[0] == "done"


def test_edits_replace_texts_that_occur_once(workspace: Workspace):
    use = workspace.use
    assert use("edit", "b/f.py\nx = 1\ny = 1\n") == ("done", "wrote b/f.py\n")
    assert use("edit", "b/f.py\n" + FIX.format("x = 1", "x = 2")) == (
        "done",
        "edited b/f.py in 1 places\n",
    )
    assert workspace.read("b/f.py") == "x = 2\ny = 1\n"
    kind, text = use("edit", "b/f.py\n" + FIX.format("z = 1", ""))
    assert kind == "error" and "found it 0 times" in text
    assert use("edit", "no\n" + FIX.format("z", ""))[0] == "error"


def test_snapshots_restore_files(workspace: Workspace):
    workspace.use("shell", "mkdir d; echo 1 > d/f; ln -s d/f link; chmod 755 d/f")
    other = open_workspace(workspace.snapshot())
    try:
        assert other.use("shell", "pwd; cat link; stat -c %a d/f") == (
            "done",
            "/tmp/work\n1\n755\n",
        )
        # A lost sandbox is replaced, with the files of the last call.
        other.use("shell", "echo 2 > d/f")
        other._sandbox.kill()
        kind, text = other.use("shell", "echo lost")
        assert kind == "crashed" and "the workspace was lost" in text
        assert other.use("shell", "cat d/f") == ("done", "2\n")
    finally:
        other.close()


@pytest.mark.parametrize(
    ("command", "kind", "words"),
    [
        ("kill -9 $$", "done", "exit code -9"),
        ("kill -9 1; kill -STOP 1; echo on", "done", "on"),
        (":(){ :|:& };:", "done", ""),
        ("dd if=/dev/zero of=big bs=1M count=2", "done", "File too large"),
        ("for i in $(seq 20); do head -c 1000000 /dev/zero > f$i; done", "done", "No space left"),
        ("yes", "crashed", "too much output"),
        ("sleep 30", "timeout", "no end within 2 s"),
        ("echo > /dev/tcp/1.1.1.1/80", "done", "exit code"),
        ("touch /usr/x /etc/x", "done", "Read-only file system"),
        ("cat /etc/shadow /root/.bashrc", "done", "No such file"),
        ("rm -rf /tmp/work; ln -s /etc /tmp/work", "done", ""),
        ("exec 3<>/proc/1/mem", "done", "exit code"),
    ],
)
def test_workspaces_survive_hostile_commands(
    workspace: Workspace, command: str, kind: str, words: str, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as limited:
        if kind == "timeout":
            limited.setattr(workspace, "_timeout_s", 2.0)
        found, text = workspace.use("shell", command)
    assert found == kind and words in text[-300:]
    # The next call works, in a folder that can be written to.
    workspace.use("shell", "rm -f /tmp/work || rm -rf /tmp/work/*; mkdir -p /tmp/work")
    assert workspace.use("shell", "cd /tmp/work && echo fine > f && cat f") == ("done", "fine\n")


def test_memory_of_all_processes_is_limited(workspace: Workspace):
    program = (
        "import os, time\n"
        "for _ in range(3): os.fork()\n"
        "held = bytearray(100 << 20)\ntime.sleep(30)\n"
    )
    kind, text = workspace.use("python", program)
    assert kind == "crashed" and "too much memory" in text
    assert workspace.use("shell", "echo fine") == ("done", "fine\n")


def test_files_outside_of_the_folder_are_not_read(workspace: Workspace):
    workspace.use(
        "shell", "ln -s /tmp/.directory link; ln -s /tmp root; mkfifo pipe; echo in > f; mkdir d"
    )
    paths = ("link", "root/.directory", "pipe", "../.directory", "d", "none")
    assert [workspace.read(path) for path in paths] == [""] * 6
    assert workspace.read("f") == "in\n"


def test_calls_of_a_conversation_are_in_order_and_end_with_it():
    workspaces = Workspaces(CONFIG, ToolsConfig(names=("shell",), max_output_chars=8))

    async def main() -> float:
        start = pack_files({"f": RepositoryFile(b"1")})
        async with workspaces.open(lambda: start) as conversation:
            assert not conversation.is_open
            calls = [conversation("shell", f"echo {n} >> f; tr -d '\\n' < f") for n in range(3)]
            results = await asyncio.gather(*calls)
            assert [(each.kind, each.text) for each in results] == [
                ("done", "10"),
                ("done", "101"),
                ("done", "1012"),
            ]
            assert (await conversation("shell", "echo 123456789")).text == "12345678 ..."
            assert await conversation.read("f") == "10\n1\n2\n"
            slow = asyncio.create_task(conversation("shell", "sleep 30"))
            await asyncio.sleep(0.3)
            began_s = time.monotonic()
        assert (await slow).kind == "infrastructure"
        return time.monotonic() - began_s

    assert asyncio.run(asyncio.wait_for(main(), 60)) < 1.9
    found = workspaces.counters()
    assert found.pop("workspace_kept_bytes") > 100
    assert found == {
        "tool/shell/done": 4.0,
        "tool/shell/infrastructure": 1.0,
        "workspace_conversations": 1.0,
        "workspace_calls": 5.0,
        "workspace_timeouts": 0.0,
        "workspace_kills": 0.0,
        "workspace_lost": 0.0,
    }
    assert workspaces.calls == {"shell": 5} and workspaces.apart().calls == {}


def test_calls_that_kill_and_files_that_are_not_kept_are_counted():
    tools = ToolsConfig(names=("shell",), timeout_s=3.0)
    workspaces = Workspaces(CONFIG, tools)

    async def main() -> None:
        async with workspaces.open(bytes) as conversation:
            assert (await conversation("shell", "echo kept > f; sleep 30")).kind == "timeout"
            assert (await conversation("shell", "yes")).kind == "crashed"
            assert await conversation.archive() is not None
            many = "for i in 1 2 3; do head -c 900000 /dev/urandom > f$i; done"
            assert (await conversation("shell", many)).kind == "done"
            assert await conversation.archive() is None and await conversation.read("f") == "kept\n"

    asyncio.run(asyncio.wait_for(main(), 60))
    found = workspaces.counters()
    assert [found[f"workspace_{name}"] for name in ("timeouts", "kills", "lost")] == [1, 2, 0]
    assert 100 < found["workspace_kept_bytes"] < 1000
