# SPDX-License-Identifier: Apache-2.0
"""Connect a ring to what sees the collectives of this process: kernels of ours, or torch's own hooks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpilot.errors import RecordError
from ddpilot.record.buckets import BucketBook
from ddpilot.record.describe import Describer
from ddpilot.record.groups import GroupBook
from ddpilot.record.hooks import are_installed, has_hooks, install_hooks
from ddpilot.record.kernels import find_watched, install_kernels, plan_operations
from ddpilot.record.pending import PendingWorks
from ddpilot.record.recorder import Recorder
from ddpilot.record.ring import RingWriter
from ddpilot.record.sites import SiteFinder


@dataclass(frozen=True, kw_only=True)
class Connection:
    """A source that writes into a ring through `recorder`, until `disconnect` is called."""

    source: str
    recorder: Recorder
    disconnect: Callable[[], None]
    left_out: Mapping[str, str]
    """Operators that are not recorded, and why."""


def refuse_second() -> None:
    """Raise `RecordError` where this process records already, or something else watches its collectives our way."""
    from torch.distributed import distributed_c10d as registry

    watched = find_watched(plan_operations()[0]) or ("process groups" if are_installed(registry) else "")
    if watched:
        raise RecordError(
            "starting to record",
            found=f"this process records already: {watched} is watched",
            fix="Stop that recording first (`Recording.stop()`); one ring holds every collective of a process",
        )


def connect(ring: RingWriter, source: str, tell: Callable[[str], None]) -> Connection | str:
    """Connect `ring` to `source`, as in `start_recording`; what cannot be done is said in words instead."""
    problems = []
    for attempt in (_connect_kernels, _connect_hooks):
        name = attempt.__name__.removeprefix("_connect_")
        if source in ("auto", name):
            try:
                return attempt(ring, tell)
            except Exception as error:  # noqa: BLE001 - another torch may lack or refuse anything that this needs
                problems.append(f"{name}: {type(error).__name__}: {error}")
    return "; ".join(problems)


def _connect_kernels(ring: RingWriter, tell: Callable[[str], None]) -> Connection:
    from torch._C._distributed_c10d import ProcessGroup, Work

    operations, left_out = plan_operations()
    recorder = _make_recorder(ring, ProcessGroup.unbox, Work.unbox, tell)
    disconnect = install_kernels(recorder, operations)
    return Connection(source="kernels", recorder=recorder, disconnect=disconnect, left_out=left_out)


def _connect_hooks(ring: RingWriter, tell: Callable[[str], None]) -> Connection:
    from torch.distributed import distributed_c10d as registry

    if not has_hooks():
        raise NotImplementedError("this torch has none, 2.14 is the first that does")
    recorder = _make_recorder(ring, lambda group: group, lambda work: work, tell)
    disconnect = install_hooks(recorder, registry)
    left_out = {"c10d::monitored_barrier_": "torch calls no hook for it"}
    return Connection(source="hooks", recorder=recorder, disconnect=disconnect, left_out=left_out)


def _make_recorder(
    ring: RingWriter, unbox: Callable[[Any], Any], unbox_work: Callable[[Any], Any], tell: Callable[[str], None]
) -> Recorder:
    import torch
    from torch.distributed import distributed_c10d as registry

    def is_capturing() -> bool:
        cuda: Any = torch.cuda
        return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())

    describer = Describer(
        ring,
        groups=GroupBook(registry),
        buckets=BucketBook(torch.nn.parallel.DistributedDataParallel),
        sites=SiteFinder(torch=os.path.dirname(torch.__file__), ours=str(Path(__file__).parents[1])),
        unbox=unbox,
    )
    pending = PendingWorks(ring, unbox=unbox_work, is_capturing=is_capturing)
    return Recorder(ring, describer, pending, tell=tell, is_in_group=registry.is_initialized)
