# SPDX-License-Identifier: Apache-2.0
"""Random faults on 4 ranks that train a DDP model: is each reported in time, with rank and cause, and no orphan left?

A fault is stamped on the machine's monotonic clock right before it happens. The peer, torch.multiprocessing.spawn, gets
one fault of each kind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn as torch_spawn
from torch.nn.parallel import DistributedDataParallel

import ddpilot
from benchmarks.leftovers import MARK, describe_process, marked_pids, settle
from benchmarks.measure import Row, main, render_values
from ddpilot.launching.rank_server.client import server_pids

NUM_RANKS = 4
LIMIT_S = 2.0
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to which rank when it has made `step` steps. `delay_s`: between SIGSTOP and SIGKILL."""

    kind: str
    rank: int
    step: int
    delay_s: float
    exitcode: int


@dataclass(kw_only=True)
class Outcome:
    """Seconds from the fault to the report and to the end of the last process, and everything that was wrong."""

    reported_s: float = float("nan")
    wrong: list[str] = field(default_factory=list)


KINDS = ("kill", "stop_then_kill", "raise", "exit", "kill_parent")


def draw_faults(count: int, seed: int = 0) -> list[Fault]:
    """`count` faults, the same for the same seed, the kinds in turn."""
    draw = random.Random(seed)
    return [
        Fault(
            kind=KINDS[i % len(KINDS)],
            rank=draw.randrange(NUM_RANKS),
            step=draw.randrange(30),
            delay_s=draw.random() / 2,
            exitcode=draw.choice([0, 1, 3]),
        )
        for i in range(count)
    ]


def train(spawn_rank: int | None, fault: Fault, folder: Path) -> None:
    """What every rank does: train for ever, or until the fault. `spawn_rank` is given by spawn alone."""
    if spawn_rank is None:
        dist.init_process_group("gloo")
    else:
        meeting = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=meeting, rank=spawn_rank, world_size=NUM_RANKS)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    while True:
        if step == fault.step and dist.get_rank() == fault.rank:
            suffer(fault, folder)
        optimizer.zero_grad()
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        step += 1


def suffer(fault: Fault, folder: Path) -> None:
    """Do in the rank what it can do itself; tell the injector its pid for the rest, and train on until it strikes."""
    if fault.kind == "raise":
        stamp(folder)
        raise ValueError(f"bad sample at step {fault.step}")
    if fault.kind == "exit":
        stamp(folder)
        os._exit(fault.exitcode)
    (folder / "pid.writing").write_text(str(os.getpid()))
    (folder / "pid.writing").rename(folder / "pid")


def stamp(folder: Path) -> None:
    """Write down that it happens now."""
    (folder / "stamp").write_text(repr(time.monotonic()))


def strike(fault: Fault, folder: Path, parent_pid: int) -> None:
    """From outside, as soon as the rank has said its pid: kill it, stop and kill it, or kill the parent."""
    end = time.monotonic() + 60
    while not (folder / "pid").exists():
        if time.monotonic() > end:
            return  # the launch failed before; its report says how
        time.sleep(0.002)
    pid = int((folder / "pid").read_text()) if fault.kind != "kill_parent" else parent_pid
    if fault.kind == "stop_then_kill":
        os.kill(pid, signal.SIGSTOP)
        time.sleep(fault.delay_s)
    stamp(folder)
    os.kill(pid, signal.SIGKILL)


@contextmanager
def injector(fault: Fault, folder: Path, parent_pid: int) -> Iterator[None]:
    """A thread of this process that strikes where the rank cannot do it itself."""
    if fault.kind in ("raise", "exit"):
        yield
        return
    thread = threading.Thread(target=strike, args=(fault, folder, parent_pid))
    thread.start()
    yield
    thread.join()


def inject(fault: Fault, mark: str) -> Outcome:
    """Launch 4 ranks, let the fault happen, and check the report and what is left. `mark` stands in the environment."""
    outcome, before = Outcome(), marked_pids(mark)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if fault.kind == "kill_parent":
            mark = _lose_parent(fault, folder)
        else:
            with injector(fault, folder, os.getpid()):
                error = _report_of(
                    lambda: ddpilot.Launcher(nproc_per_node=NUM_RANKS, output="silent", timeout_s=60).run(
                        train, None, fault, folder
                    )
                )
                reported = time.monotonic()
            outcome.reported_s = reported - float((folder / "stamp").read_text())
            outcome.wrong += check_report(error, fault)
        happened = float((folder / "stamp").read_text())
    grace_s = max(0.0, happened + LIMIT_S - time.monotonic())
    left = settle(lambda: _processes(mark, before), grace_s=grace_s)
    outcome.wrong += [f"orphan after {LIMIT_S} s: {process}" for process in left]
    if fault.kind == "kill_parent":
        outcome.reported_s = time.monotonic() - happened
    if outcome.reported_s > LIMIT_S:
        outcome.wrong.append(f"reported after {outcome.reported_s:.2f} s")
    return outcome


def check_report(error: BaseException | None, fault: Fault) -> list[str]:
    """What is wrong with the report of a fault: type, rank, cause."""
    if not isinstance(error, ddpilot.RankError):
        return [f"RankError expected, got {type(error).__name__}: {error}"]
    wrong = [] if error.rank == fault.rank else [f"rank {fault.rank} failed, rank {error.rank} was blamed: {error}"]
    cause = error.__cause__
    if fault.kind == "raise" and not (isinstance(cause, ValueError) and f"step {fault.step}" in str(cause)):
        wrong.append(f"the ValueError is not chained: {cause!r}")
    if fault.kind in ("kill", "stop_then_kill") and (error.signal_name, "killed by SIGKILL" in str(error)) != (
        "SIGKILL",
        True,
    ):
        wrong.append(f"SIGKILL is not named: {error}")
    if fault.kind == "exit" and (error.exitcode, error.signal_name) != (fault.exitcode, None):
        wrong.append(f"exit code {fault.exitcode} is not named: {error}")
    return wrong


def _report_of(launch: Callable[[], object]) -> BaseException | None:
    try:
        launch()
    except Exception as error:  # noqa: BLE001 - whatever was reported is judged by the caller
        return error
    return None


def _processes(mark: str, before: set[int]) -> list[str]:
    spared = {os.getpid(), *server_pids(), *before}
    return [describe_process(pid) for pid in marked_pids(mark) - spared]


def _lose_parent(fault: Fault, folder: Path, how: str = "launch") -> str:
    """Launch from a process of its own and kill that; return the mark that its descendants carry."""
    mark = uuid.uuid4().hex
    argv = [sys.executable, "-m", "benchmarks.random_faults", "--parent", json.dumps(asdict(fault)), str(folder), how]
    parent = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, MARK: mark}, stderr=subprocess.DEVNULL)
    with injector(fault, folder, parent.pid):
        parent.wait(timeout=90)
    return mark


def _be_parent(fault_json: str, folder: str, how: str) -> None:
    fault = Fault(**json.loads(fault_json))
    if how == "launch":
        ddpilot.Launcher(nproc_per_node=NUM_RANKS, output="silent").run(train, None, fault, Path(folder))
    else:
        torch_spawn(train, (fault, Path(folder)), NUM_RANKS)  # type: ignore[no-untyped-call]


def inject_into_spawn(fault: Fault) -> str:
    """The same fault under spawn, in a process of its own: what it reports, in a few words, and how many orphans."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mark = _lose_parent(fault, folder, "spawn")
        happened = float((folder / "stamp").read_text())
        took_s = time.monotonic() - happened
        left = settle(lambda: _processes(mark, set()), grace_s=max(0.0, LIMIT_S - took_s))
        for pid in marked_pids(mark):
            os.kill(pid, signal.SIGKILL)
    end = "" if fault.kind == "kill_parent" else f"{took_s:.1f} s, "
    return f"{fault.kind}: {end}{len(left)} orphans"


def measure(rounds: int) -> list[Row]:
    """The bar over `rounds` faults; what was wrong goes to stderr."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    outcomes = []
    for number, fault in enumerate(draw_faults(rounds)):
        outcomes.append(inject(fault, mark))
        for text in outcomes[-1].wrong:
            print(f"fault {number} {fault}: {text}", file=sys.stderr)
    taken = [outcome.reported_s for outcome in outcomes]
    num_wrong = sum(bool(outcome.wrong) for outcome in outcomes)
    peer = [inject_into_spawn(fault) for fault in draw_faults(len(KINDS))]
    return [
        Row(
            what=f"{rounds} random faults on {NUM_RANKS} ranks: fault to report",
            ours=f"{render_values(taken)}, {num_wrong} wrong",
            peer=f"spawn: {'; '.join(peer)}",
            ratio=f"slowest {max(taken):.2f} s, median {statistics.median(taken):.2f} s",
            bar="each within 2 s, right rank and cause, 0 orphans",
            holds=num_wrong == 0,
        )
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--parent"]:
        _be_parent(*sys.argv[2:])
    else:
        sys.exit(main(measure, rounds=200))
