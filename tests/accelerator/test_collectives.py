# SPDX-License-Identifier: Apache-2.0
"""The emulated accelerator's collectives: their values are gloo's, and to the host they behave as NCCL's do."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from tests.accelerator import on_device, why_not
from tests.soak import often

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can"),
    pytest.mark.timeout(300),
]

LIMIT_S = 150.0


def run(*names: str, num_ranks: int = 2, limit_s: float = LIMIT_S, **variables: str) -> list[dict[str, Any]]:
    """What each rank's functions returned; fails where one did not come to its end."""
    return on_device.run_to_the_end(__file__, *names, num_ranks=num_ranks, limit_s=limit_s, **variables)


# Values


def values_of_all_collectives() -> dict[str, float]:
    """Run every collective on the device and, over gloo, on the CPU; return the largest difference of each."""
    rank, num_ranks, device = on_device.join("cpu:gloo,emu:eccl")
    here = {name: call(rank, num_ranks, torch.device("cpu")) for name, call in CALLS.items()}
    there = {name: call(rank, num_ranks, device) for name, call in CALLS.items()}
    differences = {}
    for name, values in here.items():
        pairs = zip(values, there[name], strict=True)
        differences[name] = max(float((a.double() - b.cpu().double()).abs().max()) for a, b in pairs)
    averaged = torch.full((3,), float(rank), dtype=torch.float64, device=device)
    dist.all_reduce(averaged, ReduceOp.AVG)
    differences["average"] = float((averaged.cpu() - (num_ranks - 1) / 2).abs().max())
    dist.barrier()
    dist.destroy_process_group()
    return differences


def numbers(rank: int, device: torch.device, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Numbers that differ from rank to rank, the same on every device."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(rank + 1), dtype=torch.float64) * 7
    return made.to(dtype).to(device)


def all_reduce(op: Any, dtype: torch.dtype = torch.float64) -> Callable[..., list[torch.Tensor]]:
    """An all_reduce with `op`."""

    def call(rank: int, _: int, device: torch.device) -> list[torch.Tensor]:
        values = numbers(rank, device, 5, 3, dtype=dtype)
        dist.all_reduce(values, op)
        return [values]

    return call


def broadcast(rank: int, num_ranks: int, device: torch.device) -> list[torch.Tensor]:
    """Of the last rank's numbers, more than a socket takes at once."""
    values = numbers(rank, device, 300_000)
    dist.broadcast(values, src=num_ranks - 1)
    return [values]


def reduce(rank: int, _: int, device: torch.device) -> list[torch.Tensor]:
    """To rank 1; of the other ranks the values are undefined."""
    values = numbers(rank, device, 6)
    dist.reduce(values, dst=1)
    return [values if rank == 1 else values[:0].sum()]


def all_gather(rank: int, num_ranks: int, device: torch.device) -> list[torch.Tensor]:
    """Into a list and into one tensor."""
    parts = [torch.empty(4, dtype=torch.float64, device=device) for _ in range(num_ranks)]
    dist.all_gather(parts, numbers(rank, device, 4))
    whole = torch.empty(4 * num_ranks, dtype=torch.float64, device=device)
    dist.all_gather_into_tensor(whole, numbers(rank, device, 4))
    return [*parts, whole]


def reduce_scatter(rank: int, num_ranks: int, device: torch.device) -> list[torch.Tensor]:
    """From one tensor."""
    part = torch.empty(3, dtype=torch.float64, device=device)
    dist.reduce_scatter_tensor(part, numbers(rank, device, 3 * num_ranks))
    return [part]


def all_to_all(rank: int, num_ranks: int, device: torch.device) -> list[torch.Tensor]:
    """With equal parts, and with rank i sending i + 1 rows to each."""
    equal = torch.empty(2 * num_ranks, dtype=torch.float64, device=device)
    dist.all_to_all_single(equal, numbers(rank, device, 2 * num_ranks))
    sent, received = [rank + 1] * num_ranks, [sender + 1 for sender in range(num_ranks)]
    uneven = torch.empty(sum(received), 2, dtype=torch.float64, device=device)
    dist.all_to_all_single(uneven, numbers(rank, device, sum(sent), 2), received, sent)
    return [equal, uneven]


def gather_and_scatter(rank: int, num_ranks: int, device: torch.device) -> list[torch.Tensor]:
    """To and from rank 0."""
    parts = [torch.zeros(3, dtype=torch.float64, device=device) for _ in range(num_ranks)]
    dist.gather(numbers(rank, device, 3), parts if rank == 0 else None, dst=0)
    own = torch.empty(3, dtype=torch.float64, device=device)
    dist.scatter(own, [part * 2 for part in parts] if rank == 0 else None, src=0)
    return [*parts, own]


def send_and_receive(rank: int, num_ranks: int, device: torch.device) -> list[torch.Tensor]:
    """Around a ring, first one call after the other, then in one batch with more than a socket takes at once."""
    after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    one = torch.empty(3, dtype=torch.float64, device=device)
    if rank == 0:
        dist.send(numbers(rank, device, 3), after)
    dist.recv(one, before)
    if rank != 0:
        dist.send(numbers(rank, device, 3), after)
    many = torch.empty(200_000, dtype=torch.float64, device=device)
    calls: list[Any] = [
        dist.P2POp(dist.isend, numbers(rank, device, 200_000), after),
        dist.P2POp(dist.irecv, many, before),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return [one, many]


def objects(rank: int, num_ranks: int, device: torch.device) -> list[torch.Tensor]:
    """Objects, which travel as tensors of the group's device."""
    gathered: list[Any] = [None] * num_ranks
    dist.all_gather_object(gathered, {"rank": rank})
    return [torch.tensor([one["rank"] for one in gathered], device=device)]


def coalesced(rank: int, _: int, device: torch.device) -> list[torch.Tensor]:
    """Several all_reduces in one call, over gloo one after the other."""
    values = [numbers(rank + 10 * at, device, 4) for at in range(3)]
    if device.type == "cpu":
        for one in values:
            dist.all_reduce(one)
    else:
        with c10d._coalescing_manager(device=device):
            for one in values:
                dist.all_reduce(one)
    return values


CALLS: dict[str, Callable[[int, int, torch.device], list[torch.Tensor]]] = {
    "sum": all_reduce(ReduceOp.SUM),
    "min": all_reduce(ReduceOp.MIN),
    "max": all_reduce(ReduceOp.MAX),
    "product": all_reduce(ReduceOp.PRODUCT),
    "sum of int64": all_reduce(ReduceOp.SUM, torch.int64),
    "sum of float16": all_reduce(ReduceOp.MAX, torch.float16),
    "broadcast": broadcast,
    "reduce": reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "gather and scatter": gather_and_scatter,
    "send and receive": send_and_receive,
    "objects": objects,
    "coalesced": coalesced,
}


@often("4")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_collective_gives_the_values_of_gloo(num_ranks: int) -> None:
    """To 1e-10 in float64, also with more bytes than the transport takes at once."""
    for result in run("values_of_all_collectives", num_ranks=num_ranks):
        differences = result["values_of_all_collectives"]
        assert differences.keys() == {*CALLS, "average"}
        assert max(differences.values()) < 1e-10, differences


# What the host sees


def returns_at_once() -> dict[str, Any]:
    """Rank 1 comes when rank 0's host is through with everything that does not need it."""
    rank, _, device = on_device.join(timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1, device=device))  # the communicator
    torch.accelerator.synchronize()
    store: Any = c10d._get_default_store()
    seen: dict[str, Any] = {}
    values = torch.full((4,), rank + 1.0, device=device)
    if rank == 1:
        store.get("rank 0 is through")
    work: Any = dist.all_reduce(values, async_op=True)
    seen["waited for the work"] = work.wait()
    doubled = values * 2  # queued behind it
    seen["synchronous calls return no work"] = backend_of(device).allreduce([values], sync_options()) is None
    seen["completed at once"] = work.is_completed()
    seen["streams were through at once"] = torch.accelerator.current_stream().query()
    if rank == 0:
        store.set("rank 0 is through", "")
    seen["seen by item()"] = doubled[0].item()
    seen["completed in the end"] = work.is_completed()
    seen["sequence"] = backend_of(device)._get_sequence_number_for_group()
    try:
        work.is_success()
    except RuntimeError as error:
        seen["is_success"] = str(error).splitlines()[0]
    dist.destroy_process_group()
    return seen


def backend_of(device: torch.device) -> Any:
    """The default group's backend for the device."""
    group: Any = dist.group.WORLD
    return group._get_backend(device)


def sync_options() -> Any:
    """What `dist.all_reduce(..., async_op=False)` passes."""
    options = dist.AllreduceOptions()
    options.asyncOp = False
    return options


def refuses_what_nccl_refuses() -> dict[str, str]:
    """The errors that a program gets which passes the wrong thing."""
    _, _, device = on_device.join()
    said = {}
    wrong = {
        "cpu": torch.ones(2),
        "strided": torch.ones(4, 4, device=device)[:, 1],
        "type": torch.ones(2, dtype=torch.int16, device=device),
    }
    for name, tensor in wrong.items():
        try:
            backend_of(device).allreduce([tensor]).wait()
        except (ValueError, TypeError) as error:
            said[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    try:
        dist.all_reduce(torch.ones(2, dtype=torch.int64, device=device), ReduceOp.BAND)
    except ValueError as error:
        said["operation"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    dist.destroy_process_group()
    return said


def test_calls_return_before_the_peer_has_come() -> None:
    """Collectives and waits for them return at once; item() waits; the values come in the order of the streams."""
    early, _ = (result["returns_at_once"] for result in run("returns_at_once"))
    assert early == {
        "waited for the work": True,
        "synchronous calls return no work": True,
        "completed at once": False,
        "streams were through at once": False,
        "seen by item()": 6.0,
        "completed in the end": True,
        "sequence": 3,
        "is_success": "WorkECCL::isSuccess() is deprecated",
    }


def test_tensors_and_operations_that_nccl_does_not_take_are_refused() -> None:
    """CPU tensors, strided tensors, int16 and bitwise operations, in NCCL's words."""
    for result in run("refuses_what_nccl_refuses"):
        assert result["refuses_what_nccl_refuses"] == {
            "cpu": "ValueError: Tensors must be EMU and dense",
            "strided": "ValueError: Tensors must be contiguous",
            "type": "TypeError: Input tensor data type is not supported for ECCL process group: Short",
            "operation": "ValueError: Cannot use ReduceOp.BAND with ECCL",
        }


# Hangs and their ends


def aborted_without_a_peer() -> dict[str, Any]:
    """Rank 0 waits for an all_reduce that rank 1 never calls, until it is aborted from a thread."""
    rank, _, device = on_device.join()
    dist.all_reduce(torch.ones(1, device=device))
    torch.accelerator.synchronize()
    store: Any = c10d._get_default_store()
    seen: dict[str, Any] = {}
    if rank == 0:
        values = torch.full((4,), 3.0, device=device)
        work = dist.all_reduce(values, async_op=True)
        work.wait()
        after = values + 1
        thread = threading.Thread(target=lambda: seen.update(item=after[0].item()))
        thread.start()
        thread.join(1.0)
        seen["item() waits"] = thread.is_alive()
        backend = backend_of(device)
        backend.abort()
        thread.join(20.0)
        seen["item() returned"] = not thread.is_alive()
        seen["completed"] = work.is_completed()
        seen["waits again"] = work.wait()
        try:
            dist.all_reduce(values)
        except dist.DistBackendError as error:
            seen["next"] = str(error).splitlines()[0]
        backend.abort()
        store.set("rank 0 is through", "")
    else:
        store.get("rank 0 is through")
    return seen


def test_abort_ends_what_is_pending_with_partial_sums_and_without_an_error() -> None:
    """The streams run on with what was there; only the next collective raises."""
    aborted, _ = on_device.run(
        __file__, "aborted_without_a_peer", num_ranks=2, limit_s=LIMIT_S, EMU_ASYNC_ERROR_HANDLING="0"
    )
    assert aborted.status == 0, aborted.describe()
    seen = aborted.results["aborted_without_a_peer"]
    assert seen == {
        "item() waits": True,
        "item() returned": True,
        "item": 4.0,
        "completed": True,
        "waits again": True,
        "next": "ECCL communicator was aborted on rank 0.",
    }


def aborted_while_another_group_hangs() -> dict[str, bool]:
    """Rank 0 hangs in two groups and aborts one after the other."""
    rank, _, device = on_device.join()
    part = dist.new_group([0, 1])
    one = torch.ones(1, device=device)
    groups: list[Any] = [dist.group.WORLD, part]
    for group in groups:
        dist.all_reduce(one, group=group)
    torch.accelerator.synchronize()
    store: Any = c10d._get_default_store()
    if rank == 1:
        store.get("rank 0 is through")
        return {}
    for group in groups:
        dist.all_reduce(one, group=group, async_op=True)
    time.sleep(0.5)  # until both run
    aborting = [threading.Thread(target=group._get_backend(device).abort) for group in groups]
    aborting[0].start()
    aborting[0].join(1.0)
    seen = {"the first abort waits for the other group": aborting[0].is_alive()}
    aborting[1].start()
    for thread in aborting:
        thread.join(20.0)
    seen["both ended"] = not any(thread.is_alive() for thread in aborting)
    store.set("rank 0 is through", "")
    return seen


def test_abort_waits_for_what_else_runs_on_the_device() -> None:
    """NCCL frees the device's memory then, which waits for all kernels: groups that hang are to be aborted together."""
    seen, _ = run("aborted_while_another_group_hangs", EMU_ASYNC_ERROR_HANDLING="0")
    assert seen["aborted_while_another_group_hangs"] == {
        "the first abort waits for the other group": True,
        "both ended": True,
    }


def delayed() -> bool:
    """Whether this rank's collective is over at once, after both ranks have called it."""
    _, _, device = on_device.join("cpu:gloo,emu:eccl")
    work: Any = dist.all_reduce(torch.ones(1, device=device), async_op=True)
    dist.barrier()  # over gloo
    is_over: bool = work.is_completed()
    dist.destroy_process_group()
    return is_over


def test_a_delay_keeps_collectives_in_flight() -> None:
    """Of one rank, named by its number: what it holds up is in flight on all."""
    for result in run("delayed", EMU_COLLECTIVE_DELAY_S="1:3"):
        assert result["delayed"] is False


def times_out() -> None:
    """Rank 0 waits for rank 1, which computes."""
    rank, _, device = on_device.join(timeout=timedelta(seconds=2))
    dist.all_reduce(torch.ones(1, device=device))
    torch.accelerator.synchronize()
    if rank == 0:
        dist.all_reduce(torch.ones(5, device=device))
        torch.accelerator.synchronize()
        time.sleep(1.0)
        dist.all_reduce(torch.ones(5, device=device))
    else:
        time.sleep(LIMIT_S)


@pytest.mark.parametrize(
    ("handling", "status", "last"),
    [
        ("3", -6, "To avoid data inconsistency, we are taking the entire process down."),
        ("2", 1, "ECCL communicator was aborted on rank 0."),
    ],
)
def test_the_watchdog_ends_a_process_or_its_communicators_at_the_time_out(
    handling: str, status: int, last: str
) -> None:
    """At the time-out: with 3, the default, the process; with 2 the communicators. Both log the collective first."""
    variables = {"EMU_ASYNC_ERROR_HANDLING": handling}
    waiting, _ = on_device.run(__file__, "times_out", num_ranks=2, limit_s=LIMIT_S, until_rank_0=True, **variables)
    assert waiting.status == status, waiting.describe()
    assert (
        "Watchdog caught collective operation timeout: WorkECCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=5, NumelOut=5, "
        in (waiting.text)
    )
    assert "milliseconds before timing out." in waiting.text
    assert last in waiting.text


def dies_in_a_collective() -> None:
    """Rank 1 is killed while rank 0 waits for it."""
    rank, _, device = on_device.join()
    dist.all_reduce(torch.ones(1, device=device))
    torch.accelerator.synchronize()
    if rank == 1:
        time.sleep(1.0)
        os._exit(9)
    work = dist.all_reduce(torch.ones(1, device=device), async_op=True)
    assert not work.is_completed()
    torch.accelerator.synchronize()


def test_a_peers_death_is_an_error_of_the_watchdog() -> None:
    """The host waits on; the watchdog finds that the peer is gone and ends the process."""
    waiting, gone = on_device.run(__file__, "dies_in_a_collective", num_ranks=2, limit_s=LIMIT_S)
    assert gone.status == 9, gone.describe()
    assert waiting.status == -6, waiting.describe()
    assert "ECCL error: remote process exited or there was a network error (rank 1)" in waiting.text


# Communicators


def is_rank_1_waiting(name: str, rank: int, call: Callable[[], Any]) -> bool:
    """Let ranks 0 and 1 call, rank 0 later: whether rank 1's host has waited for it, as rank 0 sees it."""
    store: Any = c10d._get_default_store()
    is_waiting = False
    if rank == 0:
        store.get(f"{name}: rank 1 calls")
        time.sleep(0.5)
        is_waiting = not store.check([f"{name}: rank 1 has returned"])
    elif rank == 1:
        store.set(f"{name}: rank 1 calls", "")
    if rank < 2:
        call()
    if rank == 1:
        store.set(f"{name}: rank 1 has returned", "")
    torch.accelerator.synchronize()
    return is_waiting


def communicators_are_made_late() -> dict[str, bool]:
    """Where rank 1's host waits for rank 0, which comes later."""
    rank, _, device = on_device.join()
    one = torch.ones(1, device=device)
    if rank == 2:
        dist.all_reduce(one, async_op=True)
    seen = {"group": is_rank_1_waiting("group", rank, lambda: dist.all_reduce(one, async_op=True))}
    exchange: Any = dist.isend if rank == 0 else dist.irecv
    seen["pair"] = is_rank_1_waiting("pair", rank, lambda: exchange(one, 1 - rank))
    part = dist.new_group([0, 1])
    seen["part"] = is_rank_1_waiting("part", rank, lambda: dist.all_reduce(one, group=part, async_op=True))
    seen["again"] = is_rank_1_waiting("again", rank, lambda: dist.all_reduce(one, group=part, async_op=True))
    dist.destroy_process_group()
    return seen


def bound_group_is_made_early() -> dict[str, Any]:
    """As above, of a group that is bound to its device."""
    device = torch.device("emu", int(os.environ["RANK"]))
    rank, _, _ = on_device.join("cpu:gloo,emu:eccl", device_id=device)
    one = torch.ones(1, device=device)
    seen: dict[str, Any] = {}
    if rank == 2:
        dist.all_reduce(one, async_op=True)
    seen["group"] = is_rank_1_waiting("group", rank, lambda: dist.all_reduce(one, async_op=True))
    part = dist.new_group([0, 1])
    seen["part"] = is_rank_1_waiting("part", rank, lambda: dist.all_reduce(one, group=part, async_op=True))
    dist.barrier()
    seen["value"] = one.item()
    dist.destroy_process_group()
    return seen


def on_the_same_device() -> str:
    """Both ranks use the same device."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where = "file://" + os.environ["MEETING_FILE"]
    dist.init_process_group("eccl", init_method=where, rank=rank, world_size=num_ranks)
    try:
        dist.all_reduce(torch.ones(1, device="emu:0"))
    except dist.DistBackendError as error:
        return str(error).splitlines()[0]
    return ""


def test_communicators_are_made_by_the_first_call_which_waits_for_all() -> None:
    """The host waits for the first collective of a group, of a pair and of a part, and not for the next one."""
    first, *_ = run("communicators_are_made_late", num_ranks=3)
    assert first["communicators_are_made_late"] == {"group": True, "pair": True, "part": True, "again": False}


def test_a_group_bound_to_its_device_is_connected_at_once_and_so_are_its_parts() -> None:
    """No collective waits on the host: init_process_group and new_group have waited for all ranks."""
    first, *_ = run("bound_group_is_made_early", num_ranks=3)
    assert first["bound_group_is_made_early"] == {"group": False, "part": False, "value": 6.0}


def test_two_ranks_on_one_device_are_refused() -> None:
    """With the two ranks and the device, on both."""
    for result in run("on_the_same_device"):
        text = "ECCL error: invalid usage. Last error: Duplicate GPU detected : rank 1 and rank 0 both on EMU device 0"
        assert result["on_the_same_device"] == text


# Training


def trained_weights() -> dict[str, list[float]]:
    """Train three models under DDP on the device; return how far each is from a CPU alone, and a checksum of that."""
    rank, num_ranks, device = on_device.join()
    torch.set_default_dtype(torch.float64)
    sums = {}
    for name, make in MODELS.items():
        model, (inputs, targets), loss_of = make()
        parallel = DistributedDataParallel(model.to(device), bucket_cap_mb=0.01)
        train(parallel, inputs[rank::num_ranks].to(device), targets[rank::num_ranks].to(device), loss_of)
        alone, (inputs, targets), loss_of = make()
        train(alone, inputs, targets, loss_of)
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        sums[name] = [max(float((a.detach().cpu() - b.detach()).abs().max()) for a, b in pairs)]
        sums[name].append(float(sum(b.detach().abs().sum() for b in alone.parameters())))
    dist.destroy_process_group()
    return sums


def trained_with_a_hook() -> list[float]:
    """Train under DDP with gradients as float16, whose hook calls back when they have come; on the CPU and there."""
    rank, num_ranks, device = on_device.join("cpu:gloo,emu:eccl")
    models = []
    for where in (torch.device("cpu"), device):
        model, (inputs, targets), loss_of = mlp()
        parallel = DistributedDataParallel(model.to(where))
        parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
        train(parallel, inputs[rank::num_ranks].to(where), targets[rank::num_ranks].to(where), loss_of)
        models.append(model)
    pairs = zip(*(model.parameters() for model in models), strict=True)
    differences = [float((a.detach() - b.detach().cpu()).abs().max()) for a, b in pairs]
    dist.destroy_process_group()
    return differences


def train(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor, loss_of: Any) -> None:
    """Four updates on all of the rows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()


def mlp() -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor], Any]:
    """Three layers, and numbers as targets."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)]
    return torch.nn.Sequential(*layers), (torch.randn(16, 6), torch.randn(16, 2)), torch.nn.functional.mse_loss


def cnn() -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor], Any]:
    """Two convolutions with a pool, and classes as targets."""
    torch.manual_seed(1)
    layers = [
        torch.nn.Conv2d(3, 6, 3, padding=1),
        torch.nn.GroupNorm(2, 6),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(6, 8, 3),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 5),
    ]
    data = (torch.randn(16, 3, 8, 8), torch.randint(0, 5, (16,)))
    return torch.nn.Sequential(*layers), data, torch.nn.functional.cross_entropy


class GPT(torch.nn.Module):
    """Two blocks of causal attention over 11 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(11, 16), torch.nn.Embedding(7, 16)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = torch.nn.Linear(16, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [rows, classes, places]."""
        hidden: torch.Tensor = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        mask = torch.full((7, 7), float("-inf"), device=tokens.device).triu(1)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask)
        logits: torch.Tensor = self.head(hidden)
        return logits.transpose(1, 2)


def gpt() -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor], Any]:
    """The small GPT, and the next tokens as targets."""
    torch.manual_seed(2)
    tokens = torch.randint(0, 11, (16, 8))
    return GPT(), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), torch.nn.functional.cross_entropy


MODELS: dict[str, Callable[[], Any]] = {"mlp": mlp, "cnn": cnn, "gpt": gpt}


@often("2")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_models_train_under_ddp_with_the_numbers_of_the_cpu(num_ranks: int) -> None:
    """An MLP, a CNN and a small GPT: to 1e-10 in float64 what one process gets from all rows."""
    for result in run("trained_weights", num_ranks=num_ranks):
        for name, (difference, checksum) in result["trained_weights"].items():
            assert checksum > 1.0
            assert difference < 1e-10, name


def test_models_train_with_hooks_of_ddp() -> None:
    """The hook's callback runs on the streams of the device: to 1e-6 in float32 what the CPU gets over gloo."""
    for result in run("trained_with_a_hook"):
        assert max(result["trained_with_a_hook"]) < 1e-6
