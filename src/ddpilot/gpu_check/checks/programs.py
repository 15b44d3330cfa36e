# SPDX-License-Identifier: Apache-2.0
"""Programs of checks that compare source lines, written like user code.

ddpilot never reports its own lines, so they run from a copy outside the package, see `import_copy`.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpilot.gpu_check.catalogue import Answer
from ddpilot.gpu_check.checks.accelerator import backend_of, join_pair, keep_busy, read_own_ring, wait_for
from ddpilot.group.init_group import init_group
from ddpilot.record.flight_ring.log import Collective, RankLog

LATE_S = 6.0
NUM_SLOW_STEPS = 60
_NUM_STEPS = 4
_WIDTH = 1024


def make_model() -> tuple[torch.device, DistributedDataParallel]:
    """Return the device, and a model after its first step."""
    device = join_pair()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    model = DistributedDataParallel(layers.to(device))
    model(torch.ones(4, 256, device=device)).sum().backward()
    wait_for(device)
    return device, model


def _note_time(note: Path) -> None:
    # A finding may end this process at any point: the time before stays readable.
    draft = note.with_suffix(".new")
    draft.write_text(str(time.monotonic()))
    draft.replace(note)


def end_early(note: Path) -> None:
    """Rank 1 leaves the loop before rank 0. Rank 0 writes the time at which each of its steps began to `note`."""
    device, model = make_model()
    for step in range(6):
        if dist.get_rank() == 1 and step == 4:
            break
        if dist.get_rank() == 0:
            _note_time(note)
        model(torch.ones(4, 256, device=device)).sum().backward()
    wait_for(device)


def call_differently(note: Path) -> None:
    """The ranks call different collectives after three equal ones. Rank 0 writes the time before its call to `note`."""
    device = join_pair()
    ones = torch.ones(1 << 16, device=device)
    for _ in range(3):
        dist.all_reduce(ones)
    wait_for(device)
    if dist.get_rank() == 0:
        _note_time(note)
        dist.all_reduce(ones)
    else:
        dist.broadcast(ones, src=1)
    wait_for(device)
    dist.barrier()
    wait_for(device)


def skip_backward(note: Path) -> None:
    """Rank 1 skips the backward pass of the last step. Rank 0 writes the time before each backward pass to `note`."""
    device, model = make_model()
    for step in range(4):
        loss = model(torch.ones(4, 256, device=device)).sum()
        if step == 3 and dist.get_rank() == 1:
            break
        if dist.get_rank() == 0:
            _note_time(note)
        loss.backward()
        wait_for(device)
    dist.barrier()
    wait_for(device)


def train_slowly() -> float:
    """Run a correct program with a late rank 1 and work queued on rank 0. Returns its duration in seconds."""
    device, model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    began = time.monotonic()
    for step in range(NUM_SLOW_STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 256, device=device)).sum().backward()
        optimizer.step()
        if step == 20 and dist.get_rank() == 1:
            time.sleep(LATE_S)
        if step in (30, 31) and dist.get_rank() == 0:
            keep_busy(device, 4.0)
    wait_for(device)
    return time.monotonic() - began


def train_recorded(is_pair: bool) -> Answer:
    """Train a model with several buckets and check what was recorded."""
    device = join_pair() if is_pair else init_group().device
    layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device), bucket_cap_mb=4)
    for _ in range(_NUM_STEPS):
        model(torch.ones(8, _WIDTH, device=device)).sum().backward()
        wait_for(device)  # the names of rebuilt buckets are known once they were copied from the device
    log = read_own_ring()
    buckets = [each for each in log.collectives if each.ddp is not None and each.ddp.what in ("bucket", "gradients")]
    # In the second backward DDP rebuilds its buckets.
    last_two = _by_step(buckets)[-2:]
    per_step = [len(each) for each in last_two]
    lines = sorted({Path(each.line.file).name for each in buckets if each.line is not None and each.line.file})
    num_parameters = {sum(each.ddp.num_parameters for each in step if each.ddp) for step in last_two}
    evidence = (
        f"{backend_of(device)}: {len(buckets)} buckets in {_NUM_STEPS} backwards, {per_step} in the last two, "
        f"of {sorted(num_parameters)} parameters, lines in {lines}, {_describe_numbers(log)}, "
        f"faults {log.num_faults} {log.first_fault}".rstrip()
    )
    is_whole = per_step[-1] > 1 and len(buckets) == 1 + (_NUM_STEPS - 1) * per_step[-1] and num_parameters == {8}
    has_lines = all(each.line is not None and each.line.file == __file__ for each in buckets)
    return is_whole and has_lines and _are_consecutive(log) and log.num_faults == 0, evidence


def _by_step(buckets: list[Collective]) -> list[list[Collective]]:
    steps: list[list[Collective]] = []
    for each in buckets:
        if not steps or (each.ddp is not None and each.ddp.index == 0):
            steps.append([])
        steps[-1].append(each)
    return steps


def _numbers(log: RankLog) -> list[int]:
    return [each.seq for each in log.collectives if each.seq is not None]


def _are_consecutive(log: RankLog) -> bool:
    numbers = _numbers(log)
    return numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else False


def _describe_numbers(log: RankLog) -> str:
    numbers = _numbers(log)
    word = "consecutive" if _are_consecutive(log) else "not consecutive"
    return f"numbers {numbers[0]} to {numbers[-1]}, {word}" if numbers else "no numbers"


def call_each() -> Answer:
    """Call five collectives and check what was recorded."""
    device = join_pair()
    before = len(read_own_ring().collectives)
    ones = torch.ones(4, device=device)
    dist.all_reduce(ones)
    dist.broadcast(ones, src=0)
    dist.all_gather([torch.zeros_like(ones) for _ in range(2)], ones)
    dist.reduce_scatter_tensor(torch.zeros(2, device=device), ones)
    dist.barrier()
    wait_for(device)
    log = read_own_ring()
    found = log.collectives[before:]
    names = [each.op for each in found]
    right = [each.line is not None and f"dist.{each.op}" in each.line.text for each in found]
    wanted = ["all_reduce", "broadcast", "all_gather", "reduce_scatter_tensor", "barrier"]
    evidence = (
        f"{', '.join(names)}; correct lines: {sum(right)} of {len(right)}; faults {log.num_faults} {log.first_fault}"
    )
    is_named = len(names) == len(wanted) and all(name in want for name, want in zip(names, wanted, strict=True))
    return is_named and all(right) and log.num_faults == 0, evidence.rstrip()
