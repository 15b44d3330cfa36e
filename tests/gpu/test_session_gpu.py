# SPDX-License-Identifier: Apache-2.0
"""Sessions where there is a GPU: run wherever one is present, skipped with the reason where there is none."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import timedelta

import pytest

from ddpilot import LaunchInterrupted, RankError, Session
from ddpilot.environments.nvml import count_accelerators, read_gpus
from tests.dist.session.conftest import Kept, pressing_stop

NUM_GPUS = count_accelerators(os.environ)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="no NVIDIA device is visible to NVML here"),
]


@pytest.fixture
def session() -> Iterator[Session]:
    """One rank on one GPU."""
    with Session(1, view=Kept()) as started:
        yield started


def test_a_rank_has_its_gpu_and_a_group_that_takes_both_kinds_of_tensors(session: Session) -> None:
    """`device` is chosen; collectives on CUDA and CPU tensors work without a call of ours."""
    session.execute(
        "import torch, torch.distributed as dist\nsums = {}\n"
        "for where in (device, 'cpu'):\n    ones = torch.ones(3, device=where)\n    dist.all_reduce(ones)\n"
        "    sums[str(where)] = ones.sum().item()"
    )
    assert session.pull("sums") == [{"cuda:0": 3.0, "cpu": 3.0}]
    assert "nccl" in session.pull("str(dist.get_backend_config())", rank=0)


def test_memory_is_free_after_a_failed_cell_unless_the_cache_is_kept(session: Session) -> None:
    """The error keeps no tensor, and the allocator's cache goes back to the driver."""
    code = (
        "import torch\ndef use():\n    big = torch.ones(250_000_000, device=device)\n    raise ValueError('big')\nuse()"
    )
    for keep_cache, wanted in ((True, True), (False, False)):
        with pytest.raises(RankError, match="big"):
            session.execute(code, keep_cache=keep_cache)
        assert (session.pull("torch.cuda.memory_reserved()", rank=0) > 500_000_000) is wanted
        assert session.pull("torch.cuda.memory_allocated()", rank=0) < 1_000_000


def test_a_ddp_model_on_nccl_goes_on_after_a_failure_and_a_stop(session: Session) -> None:
    """The communicator is aborted, a new one made, and the model bound to it."""
    session.execute(
        "import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
        "model = DDP(torch.nn.Linear(8, 1).to(device))\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "def step():\n    optimizer.zero_grad()\n    model(torch.ones(4, 8, device=device)).sum().backward()\n"
        "    optimizer.step()\n"
        "step()"
    )
    with pytest.raises(RankError, match="boom"):
        session.execute("step(); raise ValueError('boom')")
    session.execute("step()")
    with pressing_stop(1.0), pytest.raises(LaunchInterrupted):
        session.execute("while True: step()")
    session.execute("step(); torch.cuda.synchronize()")


def test_status_shows_the_gpu(session: Session) -> None:
    """Memory of this rank on it."""
    session.execute("import torch; big = torch.ones(50_000_000, device=device)")
    if session.pids()[0] not in {pid for gpu in read_gpus() for pid in gpu.memory_bytes}:
        pytest.skip("NVML does not list this machine's own process numbers, as in a container")
    (status,) = session.status()
    assert status.gpu_memory_bytes is not None
    assert status.gpu_memory_bytes > 100_000_000


@pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, {NUM_GPUS} here")
def test_ranks_stuck_in_nccl_are_freed() -> None:
    """One rank raises while the other waits in a collective on its GPU."""
    with Session(2, view=Kept()) as session:
        session.execute("import torch; kept = rank; group.all_reduce(torch.ones(1, device=device))")
        with pytest.raises(RankError, match="rank 1 raised ValueError"):
            session.execute(
                "if rank == 1: raise ValueError('boom')\n"
                "group.all_reduce(torch.ones(1, device=device)); torch.cuda.synchronize()"
            )
        session.execute("total = torch.ones(1, device=device); group.all_reduce(total)")
        assert session.pull("(kept, total.item())") == [(0, 2.0), (1, 2.0)]


def test_nccl_has_ten_minutes_and_the_device_is_named_by_its_place_on_the_bus(session: Session) -> None:
    """torch gives a group that has gloo as well 30 minutes; NCCL goes by the place on the PCI bus."""
    session.execute("from ddpilot.group.device import device_identity\nown = group.process_group._get_backend(device)")
    assert session.pull("own.options._timeout", rank=0) == timedelta(minutes=10)
    identity = session.pull("device_identity(device)", rank=0)
    assert re.fullmatch("cuda device [0-9a-f]{8}:[0-9a-f]{2}:[0-9a-f]{2}", identity)


def test_a_gpu_after_an_assertion_in_a_kernel_is_named_and_its_rank_can_be_restarted() -> None:
    """Nothing runs in that context any more; a new process has a new one."""
    view = Kept()
    with Session(1, view=view) as session:
        session.execute("import torch; kept = 'here'")
        with pytest.raises(RankError, match="device-side assert"):
            session.execute("torch.zeros(1, device=device)[torch.tensor([5], device=device)].sum().item()")
        assert any("rank 0: its device has failed and accepts no more work" in note for note in view.notes)
        assert session.pull("kept", rank=0) == "here"
        session.restart(0)
        session.execute("import torch; assert torch.ones(1, device=device).item() == 1")


@pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, {NUM_GPUS} here")
def test_a_first_nccl_collective_that_one_rank_makes_alone_costs_no_rank() -> None:
    """The communicator is made with the group, and can be aborted; one in the making could not."""
    view = Kept()
    with Session(2, view=view) as session:
        with pressing_stop(8.0), pytest.raises(LaunchInterrupted):
            session.execute(
                "import torch, torch.distributed as dist\ngroup.process_group\nif rank == 0:\n"
                "    one = torch.ones(1, device=device)\n    dist.all_reduce(one)\n    one.item()"
            )
        session.execute("group.all_reduce(torch.ones(1, device=device)); torch.cuda.synchronize()")
    assert not [note for note in view.notes if note.startswith("killing")]


@pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, {NUM_GPUS} here")
def test_nccl_groups_that_wait_for_each_other_are_all_aborted() -> None:
    """Aborting one communicator waits for the kernels of the others, which end when those are aborted as well."""
    view = Kept()
    with Session(2, view=view) as session:
        session.execute(
            "import torch, torch.distributed as dist\ngroups = [dist.new_group() for _ in range(3)]\n"
            "for each in groups:\n    dist.all_reduce(torch.ones(1, device=device), group=each)\n"
            "torch.cuda.synchronize()"
        )
        with pressing_stop(2.0), pytest.raises(LaunchInterrupted):
            session.execute(
                "if rank == 0:\n    for each in groups:\n        with torch.cuda.stream(torch.cuda.Stream()):\n"
                "            dist.all_reduce(torch.ones(1 << 20, device=device), group=each, async_op=True)\n"
                "    torch.cuda.synchronize()"
            )
        session.execute("group.all_reduce(torch.ones(1, device=device)); torch.cuda.synchronize()")
    assert not [note for note in view.notes if note.startswith("killing")]
