# SPDX-License-Identifier: Apache-2.0
"""Check that collectives are recorded with lines, and that hangs and mismatches of two ranks are reported."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpilot.errors import WatchError
from ddpilot.gpu_check.catalogue import Answer, CannotBeShownError, Outcome, judge, judge_answers
from ddpilot.gpu_check.checks import programs
from ddpilot.gpu_check.checks.accelerator import (
    import_copy,
    join_pair,
    keep_busy,
    read_own_ring,
    run_ranks,
    wait_for,
)
from ddpilot.group.init_group import init_group
from ddpilot.launching.shipping.pickling import RankResults

_NUM_IN_FLIGHT, _IN_FLIGHT_ELEMENTS = 8, 8 << 20
_BUSY_S = 2.0
_LATE_S = 2.0
_CLOCK_S = 0.5
"""Tolerance for the clocks and starts of the two processes."""


def ddp_buckets_are_recorded() -> Outcome:
    """Each gradient bucket of DDP is recorded, although the engine starts it in a thread without a Python frame."""
    return judge_answers(_run_copy("train_recorded", False, num_ranks=1))


def ddp_buckets_of_a_pair() -> Outcome:
    """Two ranks record the same buckets under the same numbers."""
    answers = list(_run_copy("train_recorded", True))
    are_equal = len({text for _, text in answers}) == 1
    return judge_answers((holds and are_equal, text) for holds, text in answers)


def collectives_are_recorded() -> Outcome:
    """Collectives of two ranks are recorded with name, number and line."""
    return judge_answers(_run_copy("call_each"))


def synchronous_collectives_are_followed() -> Outcome:
    """Synchronous collectives, for which torch returns no work, are recorded as begun until they have finished."""
    early, late = run_ranks(_call_before_the_other_rank)
    return judge(early[0] and late[0], f"rank 0 {early[1]} // rank 1, {_LATE_S:g} s late, {late[1]}")


def _call_before_the_other_rank() -> Answer:
    device = join_pair()
    ones, both = torch.ones(1024, device=device), torch.zeros(2048, device=device)
    dist.all_reduce(ones)
    wait_for(device)
    dist.barrier()
    wait_for(device)
    num_before = len(read_own_ring().collectives)
    is_late = dist.get_rank() == 1
    if is_late:
        time.sleep(_LATE_S)
    dist.all_reduce(ones)
    dist.broadcast(ones, src=1)
    dist.all_gather_into_tensor(both, ones)
    during = [each.state for each in read_own_ring().collectives[num_before:]]
    wait_for(device)
    dist.all_reduce(ones)  # a thread that starts a collective polls earlier ones
    wait_for(device)
    log = read_own_ring()
    found = log.collectives[num_before : num_before + 3]
    after = [each.state for each in found]
    lasted_s = [0.0 if each.end_ns is None else (each.end_ns - each.start_ns) / 1e9 for each in found]
    evidence = (
        f"at once: {', '.join(during)}; later: {', '.join(after)}, the shortest after {min(lasted_s):.1f} s; "
        f"faults {log.num_faults} {log.first_fault}".rstrip()
    )
    has_waited = is_late or (set(during) == {"begun"} and min(lasted_s) > _LATE_S - _CLOCK_S)
    return after == ["done"] * 3 and has_waited and log.num_faults == 0, evidence


def _run_copy(name: str, *args: Any, num_ranks: int = 2) -> RankResults:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(getattr(import_copy(folder), name), *args, num_ranks=num_ranks)


def in_flight_is_followed() -> Outcome:
    """Many large collectives in flight are followed to their end, and none is recorded as done before."""
    return judge_answers(run_ranks(_put_in_flight, num_ranks=1))


def _put_in_flight() -> Answer:
    device = init_group().device
    if device.type == "cpu":
        raise CannotBeShownError("on the CPU, collectives are not known to be in flight")
    tensors = [torch.ones(_IN_FLIGHT_ELEMENTS, device=device) for _ in range(_NUM_IN_FLIGHT)]
    dist.all_reduce(tensors[0])
    wait_for(device)
    keep_busy(device, _BUSY_S)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    during = [each.state for each in read_own_ring().collectives[-_NUM_IN_FLIGHT:]]
    is_over = works[-1].is_completed()
    wait_for(device)
    dist.all_reduce(tensors[0])
    wait_for(device)
    log = read_own_ring()
    after = [each.state for each in log.collectives[-_NUM_IN_FLIGHT - 1 : -1]]
    evidence = (
        f"in flight ({'over already' if is_over else 'not over'}): {', '.join(during)}; later: {', '.join(after)}; "
        f"faults {log.num_faults} {log.first_fault}".rstrip()
    )
    # Collectives in the middle may be left out; the oldest and the newest are followed.
    is_followed = "done" not in during and {during[0], during[-1]} == {"begun"} and "begun" not in after
    return not is_over and is_followed and log.num_faults == 0, evidence


_NAMED_S = 5.0
"""Seconds from the last progress to the end of the launch."""


def hang_is_named() -> Outcome:
    """One rank ends early while the other's device waits for it in DDP's backward."""
    return _expect_finding("end_early", {"DDP208"}, rank=1)


def mismatch_is_named() -> Outcome:
    """Ranks call different collectives under the same number."""
    return _expect_finding("call_differently", {"DDP201"}, rank=None)


def skipped_backward_is_named() -> Outcome:
    """One rank skips the backward of a bad sample and waits in a barrier; the other is in its backward."""
    return _expect_finding("skip_backward", {"DDP201", "DDP208", "DDP210"}, rank=None)


def slow_ranks_are_left_alone() -> Outcome:
    """A late rank, devices with seconds of queued work, and many quick steps cause no finding."""
    answers = run_ranks(programs.train_slowly, on_finding="stop", stall_warn_s=30.0)
    return judge(
        True, f"no finding in {max(answers):.0f} s of steps, {programs.LATE_S:.0f} s of them late, and queued work"
    )


def _expect_finding(name: str, codes: set[str], rank: int | None) -> Outcome:
    """Return "ok" if the launch of a program ends in time with a finding of `codes` on one of its lines.

    The finding also has to name `rank`, unless this is None.
    """
    with tempfile.TemporaryDirectory() as folder:
        note, copy = Path(folder) / "note", import_copy(folder)
        try:
            run_ranks(getattr(copy, name), note, on_finding="stop")
        except WatchError as error:
            took_s = time.monotonic() - float(note.read_text())
            finding = error.findings[0]
            text = " ".join(str(error.findings).split())[:500]
            names_line = Path(str(copy.__file__)).name in str(error.findings)
            names_rank = rank is None or rank in finding.ranks
            evidence = f"{finding.code} {finding.name} after {took_s:.1f} s, ranks {finding.ranks}: {text}"
            return judge(finding.code in codes and names_line and names_rank and took_s < _NAMED_S, evidence)
    return judge(False, "the launch ended without a finding")
