# SPDX-License-Identifier: Apache-2.0
"""Collectives are recorded with sequence numbers and lines, those that the autograd engine starts included."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist

from ddpilot.diagnose.gpu_check.check import CannotBeShownError, Outcome, judge
from ddpilot.diagnose.gpu_check.checks.accelerator import import_copy, keep_busy, read_own_ring, run_ranks, wait_for
from ddpilot.group.enter import init_group
from ddpilot.launching.results import RankResults

_NUM_IN_FLIGHT, _IN_FLIGHT_ELEMENTS = 8, 8 << 20
_BUSY_S = 2.0

Answer = tuple[bool, str]


def ddp_buckets_are_recorded() -> Outcome:
    """Each gradient bucket of DDP is recorded, though the engine starts it in a thread without a Python frame."""
    ((holds, evidence),) = _run_copy("train_recorded", False, num_ranks=1)
    return judge(holds, evidence)


def ddp_buckets_of_a_pair() -> Outcome:
    """Two ranks record the same buckets under the same numbers."""
    answers = _run_copy("train_recorded", True)
    texts = list(dict.fromkeys(text for _, text in answers))
    return judge(all(holds for holds, _ in answers) and len(texts) == 1, " // ".join(texts))


def collectives_are_recorded() -> Outcome:
    """Collectives of two ranks have their names, their numbers and the line that called them."""
    answers = _run_copy("call_each")
    return judge(all(holds for holds, _ in answers), " // ".join(dict.fromkeys(text for _, text in answers)))


def _run_copy(name: str, *args: Any, num_ranks: int = 2) -> RankResults:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(getattr(import_copy(folder), name), *args, num_ranks=num_ranks)


def in_flight_is_followed() -> Outcome:
    """Many large collectives in flight are followed to their end; none is taken for over while it is not."""
    ((holds, evidence),) = run_ranks(_put_in_flight, num_ranks=1)
    return judge(holds, evidence)


def _put_in_flight() -> Answer:
    device = init_group().device
    if device.type == "cpu":
        raise CannotBeShownError("the CPU has nothing in flight that is known to be unfinished")
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
    # Those in the middle may be left out; the oldest and the newest are followed.
    is_followed = "done" not in during and {during[0], during[-1]} == {"begun"} and "begun" not in after
    return not is_over and is_followed and log.num_faults == 0, evidence
