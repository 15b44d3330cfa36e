# SPDX-License-Identifier: Apache-2.0
"""What is said of real ranks that wait for each other, from their rings, their processes and their stacks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from ddpilot.findings.display import Findings
from ddpilot.watch.analysis import Analysis, analyze
from ddpilot.watch.snapshot.model import JobSnapshot
from tests.dist.watch.jobs import Job

STALL_S = 0.3
HEAD = """\
import re, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
dist.barrier()
"""
SCRIPTS = {
    "lock": 'if rank == 1:\n    re.match("(a+)+$", "a" * 60 + "b")\ndist.barrier()\n',
    "moves": """\
def work():
    total = 0
    while True:
        total += 1
        total -= 1
if rank == 1:
    work()
dist.barrier()
""",
    "called": """\
def log_loss():
    dist.all_gather_object([None, None], 1)
model = DDP(torch.nn.Linear(4, 2))
for step in range(4):
    if rank == 1 and step == 2:
        log_loss()
    model(torch.ones(3, 4)).sum().backward()
""",
    "new_group": "if rank == 0:\n    dist.new_group([0, 1])\ndist.barrier()\n",
    "handle": "if rank == 0:\n    dist.all_reduce(torch.ones(3), async_op=True).wait()\ntime.sleep(99)\n",
    "no_handle": "work = dist.all_reduce(torch.ones(3), async_op=True) if rank == 0 else None\ntime.sleep(99)\n",
    "message": """\
for step in range(3 if rank == 0 else 2):
    if rank == 0:
        dist.recv(torch.ones(2), src=1)
    else:
        dist.send(torch.ones(2), dst=0)
""",
    "join": """\
from torch.distributed.algorithms.join import Join
model = DDP(torch.nn.Linear(4, 2))
with Join([model]):
    for step in range(4 + 3 * rank):
        model(torch.ones(3, 4)).sum().backward()
dist.barrier()
""",
    "own_in_join": """\
from torch.distributed.algorithms.join import Join
model = DDP(torch.nn.Linear(4, 2))
with Join([model]):
    for step in range(4 + 3 * rank):
        model(torch.ones(3, 4)).sum().backward()
        dist.all_reduce(torch.ones(1))
""",
}


def has_ended(view: JobSnapshot) -> bool:
    """Every rank has come to an end of some kind."""
    ends = [rank.returned or rank.error is not None or rank.process.state == "ended" for rank in view.ranks.values()]
    return len(ends) == 2 and all(ends)


def is_left_alone(view: JobSnapshot) -> bool:
    """Rank 0 has begun what it does not wait for, long ago."""
    log = view.ranks[0].log if 0 in view.ranks else None
    return bool(log and log.num_begun == 2 and view.now_ns - log.collectives[-1].start_ns > 2 * STALL_S * 1e9)


UNTIL: dict[str, Callable[[JobSnapshot, Analysis], bool]] = {
    "handle": lambda view, analysis: (
        "rank 0 has waited" in str(analysis.status) and "time.sleep" in str(analysis.status)
    ),
    "no_handle": lambda view, analysis: is_left_alone(view),
    "lock": lambda view, analysis: "re.match" in str(analysis.status) and "no Python" in str(analysis.status),
    "moves": lambda view, analysis: "(moves)" in str(analysis.status),
    "join": lambda view, analysis: has_ended(view),
}
"""When the last look is taken; the others' when there is a finding."""


def explain(job: Job, until: Callable[[JobSnapshot, Analysis], bool]) -> Analysis:
    """What is said as soon as `until` holds, with the stacks that were asked for; or of the first finding."""
    earlier: JobSnapshot | None = None
    for _ in range(600):
        view = job.look()
        analysis = analyze(view, earlier, stall_s=STALL_S)
        if analysis.needs_stacks:
            view = job.look(analysis.needs_stacks)
            analysis = analyze(view, earlier, stall_s=STALL_S)
            earlier = view
        if analysis.findings or until(view, analysis):
            return analysis
        time.sleep(0.1)
    raise AssertionError(f"nothing was said: {job.look()}")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Analysis]:
    """Of each script; all of them run at once, since most of them wait. The first two compute until they are ended."""
    folder = tmp_path_factory.mktemp("stalls")
    with ExitStack() as stack:
        jobs = {}
        for name, text in SCRIPTS.items():
            script = folder / f"{name}.py"
            script.write_text(HEAD + text)
            end = stack.enter_context(ExitStack())
            jobs[name] = end, end.enter_context(Job(script, 2))
        explained = {}
        for name, (end, job) in jobs.items():
            with end:
                explained[name] = explain(job, UNTIL.get(name, lambda *_: False))
        return explained


def one(analysis: Analysis) -> tuple[str, str, tuple[int, ...]]:
    """The only finding."""
    (finding,) = analysis.findings
    return finding.code, finding.severity, finding.ranks


def test_joins_own_collectives_meet_the_others(said: dict[str, Analysis]) -> None:
    """At none of the looks until its end is there a finding."""
    assert not said["join"].findings


def test_a_collective_of_ones_own_within_join_is_the_cause(said: dict[str, Analysis]) -> None:
    """It met one of Join's, and gloo aborts some collectives later."""
    assert one(said["own_in_join"]) == ("DDP207", "error", (1,))
    assert "one of Join's" in said["own_in_join"].findings[0].why


def test_what_nobody_waits_for_may_stay(said: dict[str, Analysis]) -> None:
    """Not even a status."""
    assert (said["no_handle"].findings, said["no_handle"].status) == (Findings(), ())


def test_a_collective_in_a_function_is_told_with_the_branch_that_calls_it(said: dict[str, Analysis]) -> None:
    """The stack has the way there."""
    assert one(said["called"]) == ("DDP201", "error", (1,))
    why = said["called"].findings[0].why
    assert "called at" in why
    assert "`if rank == 1 and step == 2:`" in why


def test_a_group_that_one_rank_makes_alone_is_proven(said: dict[str, Analysis]) -> None:
    """The other one waits for it in the default group."""
    assert one(said["new_group"]) == ("DDP215", "error", (0,))


@pytest.mark.parametrize("name", ["handle", "lock", "moves"])
def test_what_a_rank_does_that_has_not_come_is_told_by_its_stack(said: dict[str, Analysis], name: str) -> None:
    """It sleeps while the other one waits for a handle; holds Python's lock; goes on. None of it is proven."""
    (line,) = said[name].status
    assert line.startswith("rank 0 has waited")
    assert not said[name].findings


def test_a_message_that_never_comes_is_named_after_the_fact(said: dict[str, Analysis]) -> None:
    """The sender has returned, and the receiver has lost its connection."""
    assert one(said["message"]) == ("DDP219", "error", (1,))
