# SPDX-License-Identifier: Apache-2.0
"""Start and stop recording collectives into a flight ring, through kernels on the dispatch key of `c10d::` calls."""

from __future__ import annotations

import atexit
import functools
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

from ddpilot.errors import RecordError
from ddpilot.record.call_sites import SiteFinder
from ddpilot.record.collectives.ddp_buckets import BucketTable
from ddpilot.record.collectives.operations import Operation, plan_operation
from ddpilot.record.collectives.recorder import RecordBuilder, Recorder
from ddpilot.record.collectives.unfinished_works import PollingThread, StreamMark, UnfinishedWorks
from ddpilot.record.flight_ring.log import GroupTable
from ddpilot.record.flight_ring.writer import RingWriter, draft_of, open_draft

NAMESPACE = "c10d"
DISPATCH_KEY = "BackendSelect"


@functools.cache
def plan_operations() -> tuple[Mapping[str, Operation], Mapping[str, str]]:
    """Plan every `c10d::` operator of this torch: those that are recorded, by name, and why each other one is not."""
    import torch

    recorded: dict[str, Operation] = {}
    left_out: dict[str, str] = {}
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith(f"{NAMESPACE}::"):
            plan = plan_operation(name, find_overload(name)._schema)
            if isinstance(plan, str):
                left_out[name] = plan
            else:
                recorded[name] = plan
    return recorded, left_out


def find_overload(name: str) -> Any:
    """Return the operator named `name`, such as ``c10d::send`` or ``c10d::send.some_overload``."""
    import torch

    base, _, overload = name.removeprefix(f"{NAMESPACE}::").partition(".")
    return getattr(getattr(torch.ops.c10d, base), overload or "default")


def find_watched(operators: Iterable[str]) -> str:
    """Return the first of `operators` that already has a kernel on our dispatch key; empty if none has."""
    import torch

    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return next((name for name in operators if has_kernel(name, DISPATCH_KEY)), "")


def install_kernels(recorder: Recorder, operations: Mapping[str, Operation]) -> Callable[[], None]:
    """Register our kernels for `operations`, which must have none on our dispatch key. Returns an undo function."""
    import torch

    library: Any = torch.library.Library(NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]
    try:
        for name, operation in operations.items():
            kernel = _make_kernel(recorder, operation, find_overload(name))
            library.impl(name.removeprefix(f"{NAMESPACE}::"), kernel, DISPATCH_KEY, with_keyset=True)
    except BaseException:
        library._destroy()
        raise
    destroy: Callable[[], None] = library._destroy
    return destroy


def _make_kernel(recorder: Recorder, operation: Operation, overload: Any) -> Callable[..., Any]:
    import torch

    rest = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    redispatch = overload._handle.redispatch_boxed
    begin, started, cut_short = recorder.begin_of(operation), recorder.started_of(operation), recorder.cut_short
    after: dict[int, Any] = {}  # by raw bits of the incoming key set: a lookup takes a third of the time of `&`

    def kernel(keyset: Any, *args: Any) -> Any:
        ticket = None
        try:
            ticket = begin(args)
            bits = keyset.raw_repr()
            result = redispatch(after.get(bits) or after.setdefault(bits, keyset & rest), *args)
            started(ticket, result)
        except BaseException as error:
            cut_short(ticket, error)
            raise
        return result

    _keep_dynamo_out(kernel.__code__)
    return kernel


def _keep_dynamo_out(code: CodeType) -> None:
    # The kernel runs inside compiled regions, where Dynamo would inspect its frame and the frames of what it calls.
    import torch

    eval_frame: Any = torch._C._dynamo.eval_frame
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    else:  # torch 2.6 and 2.7
        eval_frame.skip_code(code)


NUM_RECORDS = 8192
PAGE_BYTES = 256 * 1024
POLL_INTERVAL_S = 0.05


class Recording:
    """A recording of this process's collectives by `recorder`, until `disconnect` is called; a context manager.

    Without a recorder nothing is recorded.
    """

    def __init__(self, recorder: Recorder | None = None, disconnect: Callable[[], None] = lambda: None) -> None:
        self._recorder = recorder
        self._disconnect = disconnect
        self._pid = os.getpid()
        self._polling: PollingThread | None = None

    def start_polling(self) -> None:
        """Follow works from now on, in a thread, and stop at exit."""
        if self._recorder is not None:
            self._polling = PollingThread(self._recorder.tick, POLL_INTERVAL_S)
            atexit.register(self._exit)

    def stop(self) -> None:
        """Stop recording and close the ring; the file remains. Idempotent and not collective; called at exit."""
        recorder, self._recorder = self._recorder, None
        # A forked process has neither the thread nor its own ring.
        if recorder is not None and self._polling is not None and os.getpid() == self._pid:
            atexit.unregister(self._exit)
            self._polling.stop()
            self._disconnect()
            recorder.close()

    def _exit(self) -> None:
        # If an error ends the program, the error explains its end, and is reported by the code that caught it.
        if self._recorder is not None and os.getpid() == self._pid and not hasattr(sys, "last_value"):
            self._recorder.leave()
        self.stop()

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_recording(
    path: str | os.PathLike[str],
    *,
    rank: int,
    num_records: int = NUM_RECORDS,
    page_bytes: int = PAGE_BYTES,
    report: Callable[[str], None] | None = None,
) -> Recording:
    """Start recording every collective of this process, as `rank`, into the file `path`.

    The file appears when it is readable and replaces an existing ring. It takes 128 bytes for each of the `num_records`
    newest collectives (default 8,192), twice `page_bytes` (default 256 KiB) for the data that they share, and 4 KiB.
    `report` prints a line (default: to stderr). Not collective; may be called before or after init_process_group.

    If there is no space for the file, or this torch cannot be recorded, prints one line and returns a recording that is
    off. Raises `RecordError` if this process is already recording, or if `path` exists and is not a ring.
    """
    show = report or (lambda text: _print_line(rank, text))
    path = Path(path)
    try:
        import torch.distributed.distributed_c10d
    except ImportError as error:
        return _off(show, f"this torch has no torch.distributed ({error})")
    refuse_second()
    try:
        ring = _make_ring(path, num_records, page_bytes)
    except OSError as error:
        _discard(path)  # what was allocated would only fill the disk
        return _off(show, f"its file cannot be created ({error})")
    try:
        recording = connect(ring, show)
    except Exception as error:  # noqa: BLE001 - a different torch may lack or refuse anything that this needs
        ring.close(0)
        _discard(path)
        return _off(show, f"this torch cannot be recorded ({type(error).__name__}: {error})")
    ring.publish(_about(rank, torch.__version__))
    os.replace(draft_of(path), path)
    recording.start_polling()
    return recording


def _make_ring(path: Path, num_records: int, page_bytes: int) -> RingWriter:
    fd = open_draft(path)
    try:
        return RingWriter(fd, num_records=num_records, page_bytes=page_bytes)
    finally:
        os.close(fd)


def _discard(path: Path) -> None:
    with suppress(OSError):
        draft_of(path).unlink()


def _about(rank: int, torch_version: str) -> dict[str, Any]:
    return {
        "rank": rank,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started_ns": time.monotonic_ns(),
        "started_unix_ns": time.time_ns(),
        "torch": str(torch_version),
        "python": platform.python_version(),
    }


def _off(show: Callable[[str], None], why: str) -> Recording:
    show(f"collectives are not recorded: {why}")
    return Recording()


def _print_line(rank: int, text: str) -> None:
    sys.stderr.write(f"ddpilot: rank {rank}: {text}\n")


def refuse_second() -> None:
    """Raise `RecordError` if this process is already recording, or if other code has kernels on our dispatch key."""
    watched = find_watched(plan_operations()[0])
    if watched:
        raise RecordError(
            "starting to record",
            found=f"this process already records: {watched} has a kernel",
            fix="Stop that recording first (`Recording.stop()`); one ring holds every collective of a process",
        )


def connect(ring: RingWriter, report: Callable[[str], None]) -> Recording:
    """Register kernels that record every collective of this process into `ring`."""
    import torch
    from torch._C._distributed_c10d import ProcessGroup, Work
    from torch.distributed import distributed_c10d as registry

    from ddpilot.record.accelerator import is_capturing

    def mark_stream() -> StreamMark | None:
        if registry._world.pg_coalesce_state:  # nothing has been started yet
            return None
        return StreamMark(torch.accelerator.current_stream().record_event())

    groups = GroupTable(registry)
    builder = RecordBuilder(
        ring,
        groups=groups,
        buckets=BucketTable(torch.nn.parallel.DistributedDataParallel),
        sites=SiteFinder(torch=os.path.dirname(torch.__file__)),
        unbox=ProcessGroup.unbox,
    )
    pending = UnfinishedWorks(ring, unbox=Work.unbox, is_capturing=is_capturing, mark_stream=mark_stream)
    recorder = Recorder(ring, builder, pending, registry=registry, groups=groups, report=report)
    return Recording(recorder, install_kernels(recorder, plan_operations()[0]))
