# SPDX-License-Identifier: Apache-2.0
"""Connect a ring to what sees the collectives of this process: our dispatcher kernels, compiled or in Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpilot.errors import RecordError
from ddpilot.record.call_sites import SiteFinder
from ddpilot.record.capturing import is_capturing
from ddpilot.record.collectives import native
from ddpilot.record.collectives.ddp_buckets import BucketBook
from ddpilot.record.collectives.kernels import find_watched, install_kernels, plan_operations
from ddpilot.record.collectives.record_builder import Describer
from ddpilot.record.collectives.recorder import Recorder
from ddpilot.record.collectives.unfinished_works import PendingWorks, StreamMark
from ddpilot.record.entering import EntryFinder
from ddpilot.record.flight_ring.groups import GroupBook
from ddpilot.record.flight_ring.writer import RingWriter


class _UnavailableError(Exception):
    """This source is not there, for the stated reason; nothing is wrong."""


@dataclass(frozen=True, kw_only=True)
class Connection:
    """A source that writes into a ring through `recorder` until `disconnect` is called."""

    source: str
    recorder: Recorder
    disconnect: Callable[[], None]
    left_out: Mapping[str, str]
    """Operators that are not recorded, each with the reason."""


def refuse_second() -> None:
    """Raise `RecordError` if this process is already recording, or if other code has kernels on our dispatch key."""
    watched = find_watched(plan_operations()[0])
    if watched:
        raise RecordError(
            "starting to record",
            found=f"this process records already: {watched} is watched",
            fix="Stop that recording first (`Recording.stop()`); one ring holds every collective of a process",
        )


def connect(ring: RingWriter, source: str, tell: Callable[[str], None]) -> Connection | str:
    """Connect `ring` to `source`, as in `start_recording`. Returns the reasons as text if no source can be used."""
    problems = []
    for attempt in (_connect_native, _connect_kernels):
        name = attempt.__name__.removeprefix("_connect_")
        if source in ("auto", name):
            try:
                return attempt(ring, tell)
            except _UnavailableError as error:
                problems.append(f"{name}: {error}")
            except Exception as error:  # noqa: BLE001 - a different torch may lack or refuse anything that this needs
                problems.append(f"{name}: {type(error).__name__}: {error}")
                if attempt is _connect_native and source == "auto":
                    native.tell_refused(error, tell)
    return "; ".join(problems)


def _connect_native(ring: RingWriter, tell: Callable[[str], None]) -> Connection:
    path = native.built_path()
    if path is None or not path.exists():
        raise _UnavailableError("not built, `ddpilot build-recorder` does")
    module = native.load(path)
    parts = _Parts()
    repeats = module.Repeats(ring.map, ring.num_records, parts.groups.next_seqs, parts.sites.kind_of)
    alone = ring.next_index, ring.on_forget
    ring.next_index, ring.on_forget = repeats.next_index, repeats.forget
    recorder = parts.recorder(ring, tell, repeats)
    operations, left_out = plan_operations()
    try:
        disconnect = native.install_both(module, repeats, recorder, operations)
    except BaseException:
        ring.next_index, ring.on_forget = alone
        repeats.close()
        raise
    return Connection(source="native", recorder=recorder, disconnect=disconnect, left_out=left_out)


def _connect_kernels(ring: RingWriter, tell: Callable[[str], None]) -> Connection:
    operations, left_out = plan_operations()
    recorder = _Parts().recorder(ring, tell)
    disconnect = install_kernels(recorder, operations)
    return Connection(source="kernels", recorder=recorder, disconnect=disconnect, left_out=left_out)


class _Parts:
    """What both sources need from this process's torch."""

    def __init__(self) -> None:
        import torch
        from torch.distributed import distributed_c10d as registry

        self._torch: Any = torch
        self._registry = registry
        self._is_in_group = registry.is_initialized
        self._find_entering = EntryFinder(registry.init_process_group).find
        self.groups = GroupBook(registry)
        self.sites = SiteFinder(torch=os.path.dirname(torch.__file__), ours=str(Path(__file__).parents[1]))

    def _mark_stream(self) -> StreamMark | None:
        if self._registry._world.pg_coalesce_state:  # nothing has been started yet
            return None
        return StreamMark(self._torch.accelerator.current_stream().record_event())

    def recorder(self, ring: RingWriter, tell: Callable[[str], None], repeats: Any = None) -> Recorder:
        """Create a recorder that writes into `ring`. `repeats`: a `Repeats` of the compiled recorder."""
        from torch._C._distributed_c10d import ProcessGroup, Work

        buckets = BucketBook(self._torch.nn.parallel.DistributedDataParallel)
        describer = Describer(
            ring, groups=self.groups, buckets=buckets, sites=self.sites, unbox=ProcessGroup.unbox, memory=repeats
        )
        pending = PendingWorks(ring, unbox=Work.unbox, is_capturing=is_capturing, mark_stream=self._mark_stream)
        return Recorder(
            ring,
            describer,
            pending,
            tell=tell,
            is_in_group=self._is_in_group,
            has_used_group=lambda: self.groups.has_used_any,
            find_entering=self._find_entering,
            others=repeats,
        )
