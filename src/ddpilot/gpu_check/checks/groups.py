# SPDX-License-Identifier: Apache-2.0
"""Check process groups on the accelerator's own backend: forming, freeing stuck ranks, rebuilding.

In each check of freeing, rank 0 is stuck in a collective and rank 1 is alive outside of it, as after an error.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpilot.errors import DdpilotError
from ddpilot.gpu_check.catalogue import Answer, Outcome, judge, judge_answers
from ddpilot.gpu_check.checks.accelerator import (
    accelerator_kind,
    backend_of,
    count_devices,
    join_pair,
    run_ranks,
    wait_for,
    wait_for_file,
)
from ddpilot.group.init_group import init_group
from ddpilot.group.teardown import free_group

_FREE_LIMIT_S = 3.0
"""Seconds for which a session waits for `free_group` before it interrupts the rank."""
_STUCK_S = 3.0
_WAIT_LIMIT_S = 30.0


def group_of_one() -> Outcome:
    """One rank reduces device and CPU tensors in one group, and sends objects without using the device."""
    return judge_answers(run_ranks(_use_alone, num_ranks=1))


def _use_alone() -> Answer:
    group = init_group()
    for device in (group.device, torch.device("cpu")):
        total = torch.full((4,), 2.0, device=device)
        dist.all_reduce(total)
        if total[0].item() != 2:
            return False, f"all_reduce of 2 by one rank gave {total[0].item()} on {device}"
    before = _allocated_bytes(group.device)
    objects: list[Any] = [None]
    dist.all_gather_object(objects, {"text": "x" * 100_000})
    more = _allocated_bytes(group.device) - before
    evidence = f"{group.backend} on {group.device}; an object of 100 kB took {more} bytes of the device"
    return more == 0 and len(objects[0]["text"]) == 100_000, evidence


def _allocated_bytes(device: torch.device) -> int:
    allocated: Callable[..., int] = getattr(torch.get_device_module(device), "memory_allocated", lambda _: 0)
    return int(allocated(device))


def pair_is_formed() -> Outcome:
    """Two ranks on the accelerator's own backend get the right results from each kind of communication."""
    began = time.perf_counter()
    outcome = judge_answers(run_ranks(_use_pair))
    num = count_devices()
    where = f"on {num} device{'s' * (num > 1)}{', as two hosts' if num == 1 else ''}"
    return replace(outcome, evidence=f"{outcome.evidence}; {where}; {time.perf_counter() - began:.1f} s")


def _use_pair() -> Answer:
    device = join_pair()
    rank, wrong = dist.get_rank(), []

    def expect(name: str, found: torch.Tensor, *wanted: float) -> None:
        if found.tolist() != list(wanted):
            wrong.append(f"{name} gave {found.tolist()} instead of {list(wanted)}")

    mine = torch.full((2,), rank + 1.0, device=device)
    dist.all_reduce(total := mine.clone())
    expect("all_reduce", total, 3, 3)
    dist.broadcast(sent := mine.clone(), src=1)
    expect("broadcast", sent, 2, 2)
    dist.all_gather(parts := [torch.zeros_like(mine) for _ in range(2)], mine)
    expect("all_gather", torch.cat(parts), 1, 1, 2, 2)
    dist.reduce_scatter_tensor(part := torch.zeros(1, device=device), mine)
    expect("reduce_scatter", part, 3)
    if rank == 0:
        dist.send(mine, 1)
    else:
        dist.recv(received := torch.zeros_like(mine), 0)
        expect("recv", received, 1, 1)
    dist.barrier()
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, rank)
    if objects != [0, 1]:
        wrong.append(f"all_gather_object gave {objects}")
    return not wrong, "; ".join(wrong) or f"{backend_of(device)}: 7 kinds of communication are right"


def stuck_rank_is_freed() -> Outcome:
    """A rank whose device waits in a collective is freed, and does not continue after the aborted collective."""
    return _judge_first(_wait_in_item)


def _wait_in_item(done: Path) -> None:
    device = join_pair()
    dist.all_reduce(torch.ones(1, device=device))
    wait_for(device)
    if dist.get_rank():
        wait_for_file(done, _WAIT_LIMIT_S + 10)
        return
    weight, gradient = torch.nn.Parameter(torch.ones(1 << 20, device=device)), torch.ones(1 << 20, device=device)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = gradient.clone()

    def wait() -> float:
        dist.all_reduce(gradient)
        return (weight.detach() - gradient).sum().item()

    # NCCL's abort raises no error on the host; the program's next operations raise.
    _free_while(done, wait, optimizer.step, wait, least_s=_STUCK_S)


def _free_while(done: Path, wait: Callable[[], object], *then: Callable[[], object], least_s: float = 0.0) -> None:
    """Free the group while `wait` is stuck, and answer if it ended in time and it, or all of `then`, raised."""
    freed: list[str] = []

    def free() -> None:
        time.sleep(_STUCK_S)
        began = time.monotonic()
        freed.append(f"{free_group()} in {time.monotonic() - began:.1f} s")

    threading.Thread(target=free, daemon=True).start()
    began = time.monotonic()
    ends = [_end_of(wait)]
    took_s = time.monotonic() - began
    ends += [] if ends[0].startswith("raised") else map(_end_of, then)
    is_in_time = least_s <= took_s < _STUCK_S + _FREE_LIMIT_S
    holds = is_in_time and all(end.startswith("raised") for end in ends[-len(then) :])
    how = freed[0] if freed else "free_group() has not returned"
    _answer(done, holds, f"after {took_s:.1f} s: {', then '.join(ends)}; {how}")


def _end_of(function: Callable[[], object]) -> str:
    try:
        return f"returned {function()}"
    except Exception as error:  # noqa: BLE001 - the exception is the evidence
        return f"raised {_short(error)}"


def first_collective_is_freed() -> Outcome:
    """A rank that is stuck in the group's first collective, which creates communicators, is freed too."""
    return _judge_first(_wait_in_first)


def _wait_in_first(done: Path) -> None:
    device = join_pair()
    if dist.get_rank():
        wait_for_file(done, _WAIT_LIMIT_S + 10)
        return

    def wait() -> None:
        dist.all_reduce(torch.ones(1, device=device))
        wait_for(device)

    _free_while(done, wait, wait)


def three_stuck_groups_are_freed() -> Outcome:
    """Three communicators with kernels in flight are aborted together within the limit."""
    return _judge_first(_wait_in_three)


def _wait_in_three(done: Path) -> None:
    device = join_pair()
    groups = [dist.new_group() for _ in range(3)]
    for group in groups:
        dist.all_reduce(torch.ones(1, device=device), group=group)
    wait_for(device)
    if dist.get_rank():
        wait_for_file(done, _WAIT_LIMIT_S + 10)
        return
    for group in groups:
        dist.all_reduce(torch.ones(1 << 20, device=device), group=group, async_op=True)
    found: list[str] = []
    began = time.monotonic()
    thread = threading.Thread(target=lambda: found.append(str(free_group())), daemon=True)
    thread.start()
    thread.join(_WAIT_LIMIT_S)
    took_s = time.monotonic() - began
    evidence = f"{found or 'free_group() did not return'}; {took_s:.1f} s of at most {_FREE_LIMIT_S}"
    _answer(done, took_s < _FREE_LIMIT_S, evidence)


def _judge_first(fn: Callable[[Path], None]) -> Outcome:
    """Run `fn` on two ranks and return the outcome of rank 0.

    Watching is off, as it would stop the launch first. NCCL's watchdog does not terminate a rank because the other one
    aborted, as in sessions.
    """
    env = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    with tempfile.TemporaryDirectory() as folder:
        done = Path(folder) / "done"
        try:
            run_ranks(fn, done, watch=False, env=env)
            how = ""
        # Ranks with aborted communicators may fail at exit, which is not part of the claim.
        except DdpilotError as error:
            if not done.exists():
                raise
            how = f"; then the launch ended with {_short(error)}"
        holds, evidence = json.loads(done.read_text())
    return judge(holds, f"{evidence}{how}")


def _answer(done: Path, holds: bool, evidence: str) -> None:
    """Write rank 0's answer for the parent and for rank 1, which waits for it."""
    draft = done.with_suffix(".new")
    draft.write_text(json.dumps([holds, evidence]))
    draft.replace(done)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


_ENTER = """
import os, time, torch, torch.distributed as dist
from ddpilot.gpu_check.checks.accelerator import join_pair, wait_for
from torch.nn.parallel import DistributedDataParallel as DDP
where = join_pair()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(8, 1).to(where))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
kept = rank + 10
continued = False
def step():
    optimizer.zero_grad()
    model(torch.ones(4, 8, device=where)).sum().backward()
    optimizer.step()
    wait_for(where)
step()
"""

_USE_AGAIN = """
total = torch.full((2,), rank + 1.0, device=where)
dist.all_reduce(total)
assert total.tolist() == [3.0, 3.0], total
assert kept == rank + 10
step()
"""


def session_is_freed_and_rebuilt() -> Outcome:
    """One rank of a session raises while the other's device waits: it is freed, and the rebuilt group works."""
    from ddpilot.session.session import Session

    # On one device the rebuilt group uses gloo, which ddpilot chooses for ranks that share a device.
    num_failures = 1 if accelerator_kind() == "cuda" and count_devices() < 2 else 3
    fail = (
        "if rank == 1: raise ValueError('boom')\n"
        "dist.all_reduce(torch.ones(1 << 20, device=where)); wait_for(where); continued = True"
    )
    with Session(2) as session:
        session.execute(_ENTER)
        pids, times_s = session.pids(), []
        for _ in range(num_failures):
            times_s.append(_seconds_to_rank_error(session, fail))
            session.execute(_USE_AGAIN)
        continued = session.pull("continued", rank=0)
        kept = session.pids() == pids
    spent = ", ".join(f"{each:.1f}" for each in times_s)
    evidence = f"error shown after {spent} s; same rank processes: {kept}; rank 0 continued after the wait: {continued}"
    return judge(kept and not continued and max(times_s) < 10, evidence)


def session_of_one_continues() -> Outcome:
    """A session of one rank trains a DDP model after an error and after a stop; tensors of a failed cell are freed."""
    from ddpilot.errors import LaunchInterrupted
    from ddpilot.session.session import Session

    leak = "def use():\n    big = torch.ones(100_000_000, device=where)\n    raise ValueError('boom')\nuse()"
    with Session(1) as session:
        session.execute(_ENTER)
        _seconds_to_rank_error(session, leak)
        session.execute("step()")
        _seconds_to_rank_error(session, "step(); raise ValueError('boom')")
        session.execute("step()")
        timer = threading.Timer(1.0, session.interrupt)
        timer.start()
        stopped = False
        try:
            session.execute("while True: step()")
        except LaunchInterrupted:
            stopped = True
        session.execute("step()")
        allocated = session.pull("getattr(torch.get_device_module(where), 'memory_allocated', lambda: 0)()", rank=0)
    evidence = f"interrupted: {stopped}; {allocated / 1e6:.0f} MB allocated after a failed cell's 400 MB"
    return judge(stopped and allocated < 100_000_000, evidence)


def device_assert_is_survived() -> Outcome:
    """After a device-side assert, which is fatal for the process, variables are kept and a restarted rank computes."""
    from ddpilot.session.session import Session

    bad = "torch.zeros(1, device=where)[torch.tensor([5], device=where)].sum().item()"
    with Session(1) as session:
        session.execute(_ENTER)
        took_s = _seconds_to_rank_error(session, bad)
        kept = session.pull("kept", rank=0)
        session.restart(0)
        session.execute("import torch; total = torch.ones(2, device=device).sum().item()")
        total = session.pull("total", rank=0)
    evidence = (
        f"RankError after {took_s:.1f} s, variables kept: {kept == 10}; after a restart the device adds to {total}"
    )
    return judge(kept == 10 and total == 2, evidence)


def _seconds_to_rank_error(session: Any, code: str) -> float:
    from ddpilot.errors import RankError

    began = time.monotonic()
    try:
        session.execute(code)
    except RankError:
        return time.monotonic() - began
    raise AssertionError(f"this cell raised no RankError: {code}")
