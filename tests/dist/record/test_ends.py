# SPDX-License-Identifier: Apache-2.0
"""Rings of ranks that were killed, aborted, interrupted or released, or whose group was rebuilt."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpilot.errors import RankError
from ddpilot.group.creation import rebuild_group
from ddpilot.group.init_group import init_group
from ddpilot.group.store import resolve_endpoint
from ddpilot.group.teardown import free_group
from ddpilot.record.collectives.start_stop import start_recording
from ddpilot.record.flight_ring.log import RankLog
from ddpilot.record.flight_ring.reader import find_waiting, read_newest
from tests.dist.record.ranks import matchable, my_rank, read_all, recorded, ring_of, run, wait_for
from tests.dist.record.test_ddp import make_model, train

NUM_INTERRUPTS = 300


def is_waiting(log: RankLog) -> bool:
    """Its last collective has begun and is not over."""
    return bool(log.collectives) and log.collectives[-1].state == "begun"


def kill_one_that_waits(folder: Path) -> None:
    """Rank 1 kills rank 0, which waits for it in a broadcast."""
    dist.init_process_group("gloo")
    start_recording(ring_of(folder, my_rank()), rank=my_rank())
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    if my_rank() == 0:
        dist.broadcast(torch.ones(5), src=1)
    wait_for(folder, 0, lambda log: is_waiting(log) and log.collectives[-1].op == "broadcast")
    os.kill(int(pids[0]), signal.SIGKILL)
    time.sleep(30)


def test_ring_outlives_a_rank_that_was_killed_while_it_waited(tmp_path: Path) -> None:
    """After SIGKILL the ring says what the rank was in, that nothing ended it, and that nobody closed it."""
    with pytest.raises(RankError, match="SIGKILL"):
        run(2, kill_one_that_waits, tmp_path)
    log = read_newest(ring_of(tmp_path, 0))
    waiting = find_waiting(log)
    assert waiting is not None
    assert (waiting.op, waiting.root, waiting.num_bytes) == ("broadcast", 1, 20)
    assert waiting.line is not None
    assert waiting.line.text == "dist.broadcast(torch.ones(5), src=1)"
    assert log.closed_ns is None


def send_different_sizes(folder: Path) -> None:
    """What gloo ends the process for: an all_reduce of tensors that are not of one size."""
    dist.init_process_group("gloo")
    start_recording(ring_of(folder, my_rank()), rank=my_rank())
    dist.barrier()
    dist.all_reduce(torch.ones(4 + 100_000 * my_rank()))


def test_ring_outlives_an_abort_and_shows_the_sizes_that_differ(tmp_path: Path) -> None:
    """gloo aborts a rank whose all_reduce has another size; both rings still hold the shapes, the line, the number."""
    with pytest.raises(RankError):
        run(2, send_different_sizes, tmp_path)
    last = [log.collectives[-1] for log in read_all(tmp_path, 2)]
    assert [entry.inputs[0].shape for entry in last] == [(4,), (100_004,)]
    assert [(entry.op, entry.seq) for entry in last] == [("all_reduce", 1)] * 2
    assert last[0].line == last[1].line


def interrupt_many_times(folder: Path) -> int:
    """A signal hits a loop of collectives at any instruction, also of ours; the number of times that it did."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    num_interrupts = 0
    with recorded(folder):
        for number in range(NUM_INTERRUPTS):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.001 + number * 7e-6)
                while True:
                    dist.all_reduce(torch.ones(2))
            except KeyboardInterrupt:
                num_interrupts += 1
        wait_for(folder, 0, lambda log: log.collectives[-1].state != "begun")
    return num_interrupts


def test_records_do_not_stay_open_when_interrupts_hit_the_recording(tmp_path: Path) -> None:
    """Wherever Ctrl-C comes, the recording goes on and no record waits for ever for an end that nobody looks for."""
    assert run(1, interrupt_many_times, tmp_path)[0] == NUM_INTERRUPTS
    log = read_all(tmp_path, 1)[0]
    assert (log.num_faults, log.first_fault, log.num_torn) == (0, "", 0)
    assert [entry.index for entry in log.collectives if entry.state == "begun"] == []
    assert log.closed_ns is not None


def be_freed_and_rebuild(folder: Path) -> None:
    """A DDP model trains; rank 0 is stuck in an all_reduce, is freed, and all train on with a new group."""
    group = init_group("gloo")
    with start_recording(ring_of(folder, my_rank()), rank=my_rank()):
        model = DistributedDataParallel(make_model(), bucket_cap_mb=1)
        train(model, 2)
        dist.barrier()
        if my_rank() == 0:
            helper = threading.Thread(target=free_once_stuck, args=(folder,))
            helper.start()
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(7))
            helper.join()
        else:
            wait_for(folder, 0, lambda log: log.collectives[-1].state == "failed")
            free_group()
        endpoint = resolve_endpoint(group.topology, os.environ)
        assert rebuild_group(group.topology, endpoint, generation=1).rebound == 1
        train(model, 2)
        dist.all_reduce(torch.ones(8))
        dist.destroy_process_group()


def free_once_stuck(folder: Path) -> None:
    """Free rank 0 as soon as its ring says that it waits."""
    wait_for(folder, 0, lambda log: is_waiting(log) and bool(log.collectives[-1].pending_ns))
    free_group()


def test_recording_goes_on_when_the_group_is_freed_and_rebuilt(tmp_path: Path) -> None:
    """The stuck all_reduce has failed; the new group counts from 0; the model's buckets are named as before."""
    run(2, be_freed_and_rebuild, tmp_path)
    logs = read_all(tmp_path, 2)
    assert [log.first_fault for log in logs] == ["", ""]
    stuck = [entry for entry in logs[0].collectives if entry.inputs and entry.inputs[0].shape == (7,)]
    assert [entry.state for entry in stuck] == ["failed"]
    assert [entry for entry in logs[0].collectives if entry.state == "begun"] == []
    for log in logs:
        last = log.collectives[-1]
        assert last.group is not None
        assert last.group.incarnation == 2 or last.group.name != stuck[0].group.name  # type: ignore[union-attr]
        reduced = [entry for entry in log.collectives if entry.ddp and entry.op == "all_reduce"]
        # One bucket in the first step of a reducer, two from then on; the model has a new one with the new group.
        found = [(entry.ddp.what, entry.ddp.index, entry.ddp.num_buckets) for entry in reduced if entry.ddp]
        assert found == [("bucket", 0, 1), ("bucket", 0, 2), ("bucket", 1, 2)] * 2
        assert [entry.group == last.group for entry in reduced] == [False] * 3 + [True] * 3
    alike = [[entry for entry in matchable(log) if entry[0] == matchable(log)[-1][0]] for log in logs]
    assert alike[0] == alike[1]
    assert [entry[1] for entry in alike[0]] == list(range(len(alike[0])))


def leave_by_an_error(folder: Path) -> tuple[int | None, ...]:
    """When the ring says that this rank has left: in its group, in the `finally` of an error, and after that."""
    start_recording(ring_of(folder, my_rank()), rank=my_rank())
    seen = []
    with pytest.raises(KeyError):  # noqa: PT012 - what happens on the way out of it is the point
        dist.init_process_group("gloo")
        dist.barrier()
        beats = wait_for_beats(folder, read_all(folder, 1)[0])
        seen.append(beats.left_ns)
        try:
            raise KeyError("no such label")
        finally:
            dist.destroy_process_group()
            seen.append(wait_for_beats(folder, beats).left_ns)
    gone = wait_for(folder, 0, lambda log: log.left_ns is not None)
    dist.init_process_group("gloo")
    wait_for(folder, 0, lambda log: log.left_ns is None)
    return (*seen, gone.left_ns)


def wait_for_beats(folder: Path, before: RankLog) -> RankLog:
    """What the ring says once its thread has run twice since `before`."""
    since_ns = (before.heartbeat_ns or 0) + 10_000_000
    first = wait_for(folder, 0, lambda log: (log.heartbeat_ns or 0) > since_ns)
    return wait_for(folder, 0, lambda log: (log.heartbeat_ns or 0) > (first.heartbeat_ns or 0))


def test_a_rank_that_destroys_its_groups_has_left_unless_an_error_is_on_its_way(tmp_path: Path) -> None:
    """A `finally` may take long, and then the error is what is to be said of it."""
    in_group, in_finally, after = run(1, leave_by_an_error, tmp_path)[0]
    assert in_group is None
    assert in_finally is None
    assert after is not None


def leave_at_once(folder: Path) -> int | None:
    """Enter a group, use it, and leave it sooner than the recording's thread looks."""
    start_recording(ring_of(folder, my_rank()), rank=my_rank())
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
    return wait_for(folder, 0, lambda log: log.left_ns is not None).left_ns


def test_a_rank_that_was_in_a_group_for_a_moment_has_left_it(tmp_path: Path) -> None:
    """Nobody has seen it in there; what it has recorded says so."""
    assert run(1, leave_at_once, tmp_path)[0] is not None
