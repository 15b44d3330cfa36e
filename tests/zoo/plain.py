# SPDX-License-Identifier: Apache-2.0
"""Run a script on ranks as torchrun would, without ddpilot: what the user sees today.

One process imports torch and forks the ranks of every case, since a fresh interpreter for each would take minutes. It
is started as a program of its own, so that nothing of ddpilot's or of the tests' is in it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HANG_AFTER_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Plain:
    """How a case ended without ddpilot."""

    ends: tuple[str, ...]
    """Per rank: ``hang``, ``ok``, ``exit 1``, ``SIGABRT``, ..."""
    outputs: tuple[str, ...]
    """Per rank: what it wrote to either stream."""
    seconds: float

    @property
    def kind_of_failure(self) -> str:
        """One word for all ranks, the worst; ``silent`` where the script itself sees that its numbers are wrong."""
        for kind in ("SIGABRT", "SIGSEGV", "SIGKILL"):
            if kind in self.ends:
                return kind
        if any("WRONG" in output for output in self.outputs):  # whatever comes of leaving the group afterwards
            return "silent"
        if "hang" in self.ends:
            return "hang"
        return "ok" if set(self.ends) == {"ok"} else "error"


class PlainRunner:
    """Runs scripts one after another or, from several threads, at the same time; a context manager."""

    def __enter__(self) -> PlainRunner:
        self._lock = threading.Lock()
        environ = {name: text for name, text in os.environ.items() if not name.startswith("DDPILOT_")}
        self._folder = tempfile.TemporaryDirectory(prefix="zoo-")
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()
        self._folder.cleanup()

    def run(self, script: Path, num_ranks: int = 2, limit_s: float = HANG_AFTER_S) -> Plain:
        """Run `script` on `num_ranks` ranks; what runs after `limit_s` is killed and called a hang."""
        with self._lock:
            number = len(list(Path(self._folder.name).iterdir()))
            folder = Path(self._folder.name, str(number))
            folder.mkdir()
            self._ask(script=str(script), num_ranks=num_ranks, limit_s=limit_s, folder=str(folder))
        answer = folder / "answer.json"
        end_s = time.monotonic() + limit_s + 30
        while not answer.exists():
            if self._process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"running {script.name} plainly: the runner gave no answer in {limit_s + 30} s")
            time.sleep(0.05)
        found = json.loads(answer.read_text())
        return Plain(ends=tuple(found["ends"]), outputs=tuple(found["outputs"]), seconds=found["seconds"])

    def _ask(self, **request: Any) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        self._process.stdout.readline()  # the case is begun: its process exists


def serve() -> None:
    """Be the process that forks: a line in, a process for the case, a line out."""
    # What DDP's constructor and a first optimizer import: seconds in each rank otherwise.
    import torch._dynamo
    import torch.distributed  # noqa: F401

    for line in sys.stdin:
        if os.fork() == 0:
            os.close(sys.stdin.fileno())
            _run_case(**json.loads(line))
        sys.stdout.write("begun\n")
        sys.stdout.flush()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _run_case(script: str, num_ranks: int, limit_s: float, folder: str) -> None:
    began_s = time.monotonic()
    keeper = socket.socket()  # as tests/ports.py says; this program imports nothing of the tests
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("127.0.0.1", 0))
    port = keeper.getsockname()[1]
    pids = [_start_rank(script, rank, num_ranks, port, Path(folder), limit_s) for rank in range(num_ranks)]
    ends: dict[int, str] = {}
    while len(ends) < num_ranks and time.monotonic() < began_s + limit_s:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ends[pid] = _describe(os.waitstatus_to_exitcode(status))
        else:
            time.sleep(0.02)
    for pid in pids:
        _clear(pid)
        if pid not in ends:
            os.waitpid(pid, 0)
    seconds = time.monotonic() - began_s
    outputs = tuple(Path(folder, f"rank{rank}.txt").read_text(errors="replace") for rank in range(num_ranks))
    found = asdict(Plain(ends=tuple(ends.get(pid, "hang") for pid in pids), outputs=outputs, seconds=seconds))
    draft = Path(folder, "answer.draft")
    draft.write_text(json.dumps(found))
    draft.rename(Path(folder, "answer.json"))
    os._exit(0)


def _clear(session: int) -> None:
    """End what is left of a rank's session, such as its loader's workers, and drop the batches that they shared."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ProcessLookupError):
            fields = stat.read_text().rpartition(") ")[2].split()
            pid = int(stat.parent.name)
            if int(fields[3]) == session:
                os.kill(pid, signal.SIGKILL)
                for shared in Path("/dev/shm").glob(f"torch_{pid}_*"):
                    shared.unlink()


def _start_rank(script: str, rank: int, num_ranks: int, port: int, folder: Path, limit_s: float) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    out = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    faulthandler.dump_traceback_later(limit_s - 1, file=2)  # what hangs says where
    sys.path[0] = str(Path(script).parent)
    code = 1
    try:
        run_as_main(script)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - printed, as Python itself does
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_as_main(script: str, text: str = "") -> None:
    """Run `script` as Python does with the file that it is given; `text`: what to run in place of what is in it.

    Not `runpy.run_path`, which drops the script's globals when it is over: a DDP model's last reference, given up with
    Python's lock held while gloo's thread waits for that lock, hangs now and then (torch 2.13).
    """
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.argv[:] = [script]
    sys.modules["__main__"] = main
    exec(compile(text or Path(script).read_bytes(), script, "exec"), vars(main))


def _describe(exitcode: int) -> str:
    return "ok" if exitcode == 0 else signal.Signals(-exitcode).name if exitcode < 0 else f"exit {exitcode}"


if __name__ == "__main__":
    serve()
