# SPDX-License-Identifier: Apache-2.0
"""What a piece of work leaves behind: processes, threads, file descriptors, listening ports, shared-memory files.

The tests fail on it after each test, the benchmarks count it after many launches. Linux reads /proc (10 ms for a look
with `everywhere`, since the kernel walks its whole table of connections); elsewhere only threads are seen.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

MARK = "DDPILOT_LEFTOVERS_MARK"
"""Variable whose value marks this process and all that descend from it, also those that lost their parent."""

LEAK_PREFIX = "ddpilot-leak-test-"
"""Of shared memory that a test of this module leaves on purpose: other runs here do not take it for theirs."""

LEAK_VARIABLE = "DDPILOT_LEAK_TEST"
"""Names the file of that prefix which a run shall find."""

_PROC = Path("/proc")
_SHARED_MEMORY = Path("/dev/shm")
_LISTEN = "0A"
_PF_KTHREAD = 0x00200000
"""Flag of a thread of the kernel, which most processes of a machine are: see proc(5), `stat`."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What was there at one moment. Every entry is a short text, so that two looks can be subtracted and printed."""

    processes: frozenset[str] = field(default_factory=frozenset)
    threads: frozenset[str] = field(default_factory=frozenset)
    file_descriptors: frozenset[str] = field(default_factory=frozenset)
    listening_ports: frozenset[str] = field(default_factory=frozenset)
    shared_memory_files: frozenset[str] = field(default_factory=frozenset)

    def since(self, before: Look) -> list[str]:
        """Every entry that `before` did not have, as "kind: entry", sorted by kind."""
        # A process is the same while it sleeps and while it runs.
        known = {entry.partition(" ")[0] for entry in before.processes}
        new = {kind: getattr(self, kind) - getattr(before, kind) for kind in self.__dataclass_fields__}
        new["processes"] = {entry for entry in self.processes if entry.partition(" ")[0] not in known}
        return [f"{kind.replace('_', ' ')}: {entry}" for kind, entries in new.items() for entry in sorted(entries)]


def look(
    mark: str, *, spared_pids: Collection[int] = (), known_pids: Collection[int] = (), everywhere: bool = False
) -> Look:
    """Look once at what this process and the processes marked with `mark` hold. `spared_pids` are not reported.

    `known_pids`: processes, such as all that ran before a test, of which only this process's children are reported.
    Reading the environments of all processes of a machine takes milliseconds.
    `everywhere`: also find the ports on which the other marked processes listen, spared ones included.
    """
    threads = frozenset(f"{thread.name} ({type(thread).__name__})" for thread in threading.enumerate())
    if not _PROC.joinpath("self", "fd").exists():
        return Look(threads=threads)
    pids = marked_pids(mark, known_pids=known_pids) - {os.getpid()}
    descriptors = _descriptors()
    return Look(
        processes=frozenset(describe_process(pid) for pid in (pids | _children()) - set(spared_pids)),
        threads=threads,
        file_descriptors=frozenset(f"{number} -> {target}" for number, target in descriptors.items()),
        listening_ports=_own_ports(descriptors) | (_ports_of(pids) if everywhere else frozenset()),
        shared_memory_files=_shared_memory_files(),
    )


def _shared_memory_files() -> frozenset[str]:
    names = os.listdir(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else []
    planted = os.environ.get(LEAK_VARIABLE)
    return frozenset(name for name in names if name == planted or not name.startswith(LEAK_PREFIX))


def settle(look_now: Callable[[], list[str]], *, grace_s: float) -> list[str]:
    """Call `look_now` until it finds nothing or `grace_s` seconds have passed; return what it found last."""
    end = time.monotonic() + grace_s
    while (found := look_now()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def all_pids() -> set[int]:
    """Pids of all processes of the machine that /proc lists, of other users too."""
    return {int(name) for name in os.listdir(_PROC) if name.isdigit()} if _PROC.is_dir() else set()


def marked_pids(mark: str, *, known_pids: Collection[int] = ()) -> set[int]:
    """Pids of all live processes whose environment at `exec` carried `mark`; itself included, zombies not.

    `known_pids` are left out: their environments are not read.
    """
    wanted = f"{MARK}={mark}".encode()
    return {pid for pid in all_pids().difference(known_pids) if wanted in _environment(pid)}


def describe_process(pid: int) -> str:
    """`pid`, its state and its command, such as ``4711 (S) python -m ddpilot.launching...``; shortened to 200."""
    command = _read(f"{_PROC}/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    state = re.search(rb"\) (\w) ", _read(f"{_PROC}/{pid}/stat"))
    return f"{pid} ({state.group(1).decode() if state else 'gone'}) {command or 'no command: a zombie'}"[:200]


def unused_shared_memory(names: Collection[str]) -> list[str]:
    """Those of `names` in shared memory that still exist and that no live process maps or holds open."""
    left = {name for name in names if (_SHARED_MEMORY / name).exists()}
    for process in _PROC.iterdir() if left else ():
        if process.name.isdigit():
            held = _read(f"{process}/maps").decode(errors="replace")
            targets = set(_descriptors(int(process.name)).values())
            left = {name for name in left if f"/dev/shm/{name}" not in held and f"/dev/shm/{name}" not in targets}
    return sorted(left)


def _environment(pid: int) -> bytes:
    text = _read(f"{_PROC}/{pid}/environ")
    # While a program is being replaced by `exec`, it has no environment for a moment: a leak must not hide in that.
    for _ in range(1000):
        if text or _has_no_environment(pid):
            break
        text = _read(f"{_PROC}/{pid}/environ")
    return text


def _has_no_environment(pid: int) -> bool:
    """Whether there is nothing to read in any case: gone, a zombie, not ours to read, or started with none."""
    fields = _read(f"{_PROC}/{pid}/stat").rpartition(b") ")[2].split()  # from the third field of proc(5) on
    if len(fields) < 49 or fields[0] == b"Z" or int(fields[6]) & _PF_KTHREAD or not _target(f"{_PROC}/{pid}/exe"):
        return True
    start, end = fields[47:49]
    code_is_in_place = fields[23] != b"0"  # `exec` writes this one after the environment
    return code_is_in_place and start == end


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _children() -> set[int]:
    children: set[int] = set()
    for task in os.listdir(f"{_PROC}/self/task"):
        children.update(int(pid) for pid in _read(f"{_PROC}/self/task/{task}/children").split())
    return children


def _descriptors(pid: int | str = "self") -> dict[str, str]:
    folder = f"{_PROC}/{pid}/fd"
    found: dict[str, str] = {}
    try:
        numbers = os.listdir(folder)
    except OSError:
        return found  # the process ended between two reads
    for number in numbers:
        if target := _target(f"{folder}/{number}"):  # none: the descriptor that listed the folder
            found[number] = target
    return found


def _own_ports(descriptors: dict[str, str]) -> frozenset[str]:
    found = set()
    for number in (number for number, target in descriptors.items() if target.startswith("socket:")):
        try:
            duplicate = socket.socket(fileno=os.dup(int(number)))
        except OSError:
            continue  # closed by another thread meanwhile
        with duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6) and _accepts(duplicate):
                found.add(f"{duplicate.getsockname()[0]} port {duplicate.getsockname()[1]} of this process")
    return frozenset(found)


def _accepts(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _ports_of(pids: Collection[int]) -> frozenset[str]:
    owner = {target: pid for pid in pids for target in _descriptors(pid).values() if target.startswith("socket:")}
    found = set()
    for table in ("tcp", "tcp6") if owner else ():
        for line in _read(f"{_PROC}/net/{table}").decode().splitlines()[1:]:
            fields = line.split()
            target = f"socket:[{fields[9]}]"
            if fields[3] == _LISTEN and target in owner:
                found.add(f"{table} port {int(fields[1].rsplit(':', 1)[1], 16)} of {describe_process(owner[target])}")
    return frozenset(found)


def _read(path: str) -> bytes:
    # Many small files: a file object for each would take twice the time.
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""  # not ours to read, or gone meanwhile
    parts = []
    try:
        while part := os.read(file, 1 << 16):
            parts.append(part)
    except OSError:
        return b""
    finally:
        os.close(file)
    return b"".join(parts)
