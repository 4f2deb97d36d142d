"""The seccomp filter of the sandbox: which system calls a program may make, as classic BPF
(linux/seccomp.h, linux/filter.h).

Calls that reach other processes, memory that no limit counts, or parts of the kernel that programs
do not need fail with EPERM. Sockets are of the family AF_UNIX, with buffers of the default size.
Calls newer than this table do not exist (ENOSYS), nor does `clone3`, whose flags no filter sees;
libraries then fall back on `clone`.
"""

from __future__ import annotations

import errno
import struct

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column in the tables below, and the architecture as seccomp calls it (linux/audit.h)."""

DENIED = {
    # Memory that no limit counts.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmctl": (31, 195),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # Namespaces and file systems.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # Parts of the kernel that a program has no use for and that attackers have.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "syslog": (103, 116),
    "modify_ldt": (154, None),
}
"""Numbers of the system calls that fail with EPERM, on x86_64 and aarch64."""

CLONE3, NEWEST = 435, 462
"""The same on both machines; the newest call in the table is `mseal`. Those of x32 have
higher numbers yet."""

NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET (linux/sched.h)."""

AF_UNIX, SOL_SOCKET = 1, 1
SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE = 7, 8, 32, 33

LOAD, EQUAL, ABOVE, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
CALL, ARCHITECTURE, FIRST, SECOND, THIRD = 0, 4, 16, 24, 32
"""Offsets in `struct seccomp_data`; of each argument the lower half, which is all that the kernel
reads of an int."""

ALLOW, KILL = 0x7FFF0000, 0x80000000


def _error(number: int) -> tuple[int, int, int, int]:
    return (RETURN, 0x00050000 | number, 0, 0)


def system_call_filter(machine: str) -> bytes:
    """The filter for x86_64 or aarch64. KeyError for other machines."""
    column, architecture = MACHINES[machine]
    allow = (RETURN, ALLOW, 0, 0)
    only_unix = [(LOAD, FIRST, 0, 0), (EQUAL, AF_UNIX, 1, 0), _error(errno.EAFNOSUPPORT), allow]
    checks = {
        "socket": ((41, 198), only_unix),
        "socketpair": ((53, 199), only_unix),
        "setsockopt": (
            (54, 208),
            [
                (LOAD, SECOND, 0, 0),
                (EQUAL, SOL_SOCKET, 0, 6),
                (LOAD, THIRD, 0, 0),
                (EQUAL, SO_SNDBUF, 3, 0),
                (EQUAL, SO_RCVBUF, 2, 0),
                (EQUAL, SO_SNDBUFFORCE, 1, 0),
                (EQUAL, SO_RCVBUFFORCE, 0, 1),
                _error(errno.EPERM),
                allow,
            ],
        ),
        # Limits of this process only, which nobody raises without privilege.
        "prlimit64": (
            (302, 261),
            [(LOAD, FIRST, 0, 0), (EQUAL, 0, 1, 0), _error(errno.EPERM), allow],
        ),
        "clone": (
            (56, 220),
            [(LOAD, FIRST, 0, 0), (ANY_BIT, NEW_NAMESPACES, 0, 1), _error(errno.EPERM), allow],
        ),
    }
    # (code, number, how many to skip if true, if false)
    program = [
        (LOAD, ARCHITECTURE, 0, 0),
        (EQUAL, architecture, 1, 0),
        (RETURN, KILL, 0, 0),
        (LOAD, CALL, 0, 0),
        (ABOVE, NEWEST, 1, 0),
        (EQUAL, CLONE3, 0, 1),
        _error(errno.ENOSYS),
    ]
    for numbers in DENIED.values():
        if (number := numbers[column]) is not None:
            program += [(EQUAL, number, 0, 1), _error(errno.EPERM)]
    for numbers, steps in checks.values():
        program += [(EQUAL, numbers[column], 0, len(steps)), *steps]
    program.append(allow)
    return b"".join(
        struct.pack("=HBBI", code, if_true, if_false, number)
        for code, number, if_true, if_false in program
    )
