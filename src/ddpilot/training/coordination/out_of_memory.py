# SPDX-License-Identifier: Apache-2.0
"""Out-of-memory errors: adds memory usage and sharing ranks to them, and runs an attempt that may fail on all ranks."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from ddpilot.errors import OutOfMemoryError, RemoteRankError
from ddpilot.group.device import device_identity, empty_cache, is_out_of_memory, memory_facts, peak_bytes
from ddpilot.group.protocol import GroupLike
from ddpilot.training.batch_groups import CurrentBatch

_GIB = 2**30


def find_sharing(group: GroupLike) -> tuple[int, ...]:
    """Return the other ranks on this rank's device.

    Collective, except on the CPU and with one rank, which return ().
    """
    if group.device.type == "cpu" or group.world_size == 1:
        return ()
    mine = (socket.gethostname(), device_identity(group.device))
    everyone = group.all_gather_object(mine)
    return tuple(rank for rank, place in enumerate(everyone) if place == mine and mine[1] and rank != group.rank)


def explain_out_of_memory(
    error: BaseException, group: GroupLike, sharing: tuple[int, ...] = (), batch: CurrentBatch | None = None
) -> OutOfMemoryError:
    """Return the error to raise from `error`, with rank, batch, the device's memory and a fix. Not collective.

    `sharing`: the other ranks on this device; if there are any, the fix begins with them.
    """
    did = "training" if batch is None else f"training on batch {batch.index} of epoch {batch.epoch}"
    samples = "" if batch is None else f" with {batch.count} samples on this rank"
    first = str(error).strip().splitlines()[:1]
    fix = (
        "Use a smaller batch per rank with accumulate= (of Loop or Trainer) to keep the global batch, batch_split= for "
        "unequal devices, precision='bf16', or activation checkpointing."
    )
    if sharing:
        others = ", ".join(map(str, sharing))
        fix = f"First give each rank a device of its own: rank {group.rank} shares {group.device} with {others}. {fix}"
    return OutOfMemoryError(
        did,
        found=f"memory ran out{samples}: {describe_memory(group)}; {''.join(first) or type(error).__name__}",
        fix=fix,
    )


def describe_memory(group: GroupLike) -> str:
    """Describe the memory of the device, the part that this process uses, and the free part. Not collective."""
    if (facts := memory_facts(group.device)) is not None:
        free, total, mine = facts
        others = max(0, total - free - mine)
        peak = peak_bytes(group.device)
        return (
            f"{group.device} has {total / _GIB:.1f} GiB, of which this process holds {mine / _GIB:.1f} (tensors: at "
            f"most {peak / _GIB:.1f}), everything else {others / _GIB:.1f}, and {free / _GIB:.1f} are free"
        )
    machine = psutil.virtual_memory()
    return (
        f"this machine has {machine.total / _GIB:.1f} GiB for {group.local_world_size} rank"
        f"{'s' if group.local_world_size > 1 else ''}, of which this process holds "
        f"{psutil.Process().memory_info().rss / _GIB:.1f} and {machine.available / _GIB:.1f} are available"
    )


@dataclass(frozen=True)
class JointTry:
    """The result of an attempt that all ranks ran together; the same on all of them except for `value`."""

    value: Any
    """The return value on this rank; None if memory ran out here."""
    ran_out: tuple[int, ...]
    """The ranks on which memory ran out; empty if the attempt fit on all of them."""
    found: str
    """The error of the first of those ranks, with its memory usage; "" if there is none."""


def joint_try(attempt: Callable[[], Any], group: GroupLike) -> JointTry:
    """Run `attempt()` on every rank and return the ranks on which memory ran out, the same on all ranks. Collective.

    `attempt` must not be collective itself, because a rank that runs out of memory leaves it early. Run the module
    inside DDP (`unwrap(model)`), or use `model.no_sync()`. The memory that a failed attempt allocated is released. Any
    other exception is raised again on its rank, and as RemoteRankError on the other ranks.
    """
    value, failure = None, None
    try:
        value = attempt()
    except Exception as error:  # noqa: BLE001  (raised again below, after the exchange)
        failure = error
    ran_out = failure is not None and is_out_of_memory(failure)
    text = ""
    if failure is not None:
        text = explain_out_of_memory(failure, group).found if ran_out else f"{type(failure).__name__}: {failure}"
    outcomes = [(ran_out, text)]
    if ran_out:
        failure = None  # its traceback keeps the tensors to release alive
        release_memory(group.device)
    if group.world_size > 1:
        outcomes = group.all_gather_object(outcomes[0])
    if failure is not None:
        raise failure
    for rank, (is_memory, text) in enumerate(outcomes):
        if text and not is_memory:
            raise RemoteRankError(
                "trying something on all ranks",
                found=f"rank {rank} raised {text}",
                fix=f"Look at rank {rank}'s traceback; this rank stops with it.",
                rank=group.rank,
            )
    ranks = tuple(rank for rank, (is_memory, _) in enumerate(outcomes) if is_memory)
    return JointTry(value, ranks, outcomes[ranks[0]][1] if ranks else "")


def release_memory(device: torch.device) -> None:
    """Collect garbage and release the allocator's cached memory to `device`."""
    gc.collect()
    empty_cache(device)
