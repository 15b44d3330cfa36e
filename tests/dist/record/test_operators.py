# SPDX-License-Identifier: Apache-2.0
"""Every c10d operator of this torch is recorded, or listed with the reason why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpilot.record.collectives.start_stop import plan_operations
from tests.dist.record.ranks import my_rank, read_all, recorded, run

NOT_RECORDED = {"c10d::check_for_nan": "no process group among its arguments: it is local to the rank"}

# What the operators are recorded as. One that a later torch adds has to be named here, and called below.
OPERATORS = {
    "c10d::_allgather_base_": "all_gather_into_tensor",
    "c10d::_reduce_scatter_base_": "reduce_scatter_tensor",
    "c10d::allgather_": "all_gather",
    "c10d::allgather_coalesced_": "all_gather_coalesced",
    "c10d::allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce_coalesced",
    "c10d::alltoall_": "all_to_all",
    "c10d::alltoall_base_": "all_to_all_single",
    "c10d::barrier": "barrier",
    "c10d::broadcast_": "broadcast",
    "c10d::gather_": "gather",
    "c10d::monitored_barrier_": "monitored_barrier",
    "c10d::recv_": "recv",
    "c10d::recv_any_source_": "recv",
    "c10d::reduce_": "reduce",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "c10d::scatter_": "scatter",
    "c10d::send": "send",
}


def ones(*shape: int) -> torch.Tensor:
    """A tensor to communicate."""
    return torch.ones(*shape)


def calls(rank: int) -> dict[str, Callable[[Any], Any]]:
    """A call of every operator that is a collective, given the group, for 2 ranks."""
    pair = [ones(2), ones(2)]
    return {
        "c10d::_allgather_base_": lambda pg: pg._allgather_base(ones(4), ones(2)),
        "c10d::_reduce_scatter_base_": lambda pg: pg._reduce_scatter_base(
            ones(2), ones(4), dist.ReduceScatterOptions()
        ),
        "c10d::allgather_": lambda pg: pg.allgather([pair], [ones(2)]),
        "c10d::allgather_coalesced_": lambda pg: pg.allgather_coalesced([[ones(2)], [ones(2)]], [ones(2)]),
        "c10d::allgather_into_tensor_coalesced_": lambda pg: pg.allgather_into_tensor_coalesced([ones(4)], [ones(2)]),
        "c10d::allreduce_": lambda pg: pg.allreduce([ones(2)], dist.ReduceOp.MAX),
        "c10d::allreduce_coalesced_": lambda pg: pg.allreduce_coalesced([ones(2), ones(3)]),
        "c10d::alltoall_": lambda pg: pg.alltoall([ones(2), ones(2)], pair),
        "c10d::alltoall_base_": lambda pg: (
            pg.alltoall_base(ones(4), ones(4), [1, 3], [1, 3])
            if rank == 0
            else pg.alltoall_base(ones(4), ones(4), [3, 1], [3, 1])
        ),
        "c10d::barrier": lambda pg: pg.barrier(),
        "c10d::broadcast_": lambda pg: pg.broadcast(ones(2), 1),
        "c10d::gather_": lambda pg: pg.gather([pair] if rank == 0 else [], [ones(2)], dist.GatherOptions()),
        "c10d::reduce_": lambda pg: pg.reduce(ones(2), 1, dist.ReduceOp.PRODUCT),
        "c10d::reduce_scatter_": lambda pg: pg.reduce_scatter([ones(2)], [pair]),
        "c10d::reduce_scatter_tensor_coalesced_": lambda pg: pg.reduce_scatter_tensor_coalesced([ones(2)], [ones(4)]),
        "c10d::scatter_": lambda pg: pg.scatter([ones(2)], [pair] if rank == 0 else [], dist.ScatterOptions()),
    }


def call_them_all(folder: Path) -> dict[str, str]:
    """Call each operator once; returns the message of those that gloo has not."""
    refused = {}
    with recorded(folder):
        group: Any = dist.group.WORLD
        for operator, call in calls(my_rank()).items():
            try:
                call(group).wait()
            except (RuntimeError, NotImplementedError) as error:
                refused[operator] = str(error)
        group.monitored_barrier()
        if my_rank() == 0:
            group.send([ones(2)], 1, 7).wait()
            group.send([ones(2)], 1, 8).wait()
        else:
            group.recv([ones(2)], 0, 7).wait()
            group.recv_anysource([ones(2)], 8).wait()
    return refused


def test_operators_are_all_recorded_or_listed_with_the_reason() -> None:
    """torch registers exactly the operators that are named here; a new one has to be added, with a call of it."""
    recorded_ones, left_out = plan_operations()
    assert left_out.items() <= NOT_RECORDED.items()
    newer = {name: plan.name for name, plan in recorded_ones.items() if name not in OPERATORS}
    if torch.__version__ < "2.14":
        assert newer == {}
    assert {name: recorded_ones[name].name for name in OPERATORS} == OPERATORS


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Both ranks' rings after calling everything, and what gloo refused."""
    folder = tmp_path_factory.mktemp("operators")
    results = run(2, call_them_all, folder)
    return read_all(folder, 2), results[0]


def test_operators_leave_a_record_each_when_called(logs: Any) -> None:
    """Each of them, point-to-point included, stands in the ring of the rank that called it, also where gloo refuses."""
    (first, second), refused = logs
    seen = {collective.operator for log in (first, second) for collective in log.collectives}
    assert seen == set(OPERATORS)
    assert first.num_faults == second.num_faults == 0, (first.first_fault, second.first_fault)
    assert {entry.operator for entry in first.collectives if entry.state == "failed"} == set(refused)


def test_records_agree_between_ranks(logs: Any) -> None:
    """The ranks' collectives have the same numbers, operations, shapes, reduce-ops and roots."""
    (first, second), _ = logs
    alike = [
        [(entry.seq, entry.op, entry.reduce_op, entry.root) for entry in log.collectives if not entry.is_p2p]
        for log in (first, second)
    ]
    assert alike[0] == alike[1]
    assert [seq for seq, *_ in alike[0]] == list(range(len(alike[0])))


def test_records_hold_the_arguments(logs: Any) -> None:
    """Reduce-op, root, split sizes, shapes on both sides, bytes, peer and tag are what was asked for."""
    (first, second), _ = logs
    by_operator = {entry.operator: entry for entry in (*second.collectives, *first.collectives)}
    assert by_operator["c10d::allreduce_"].reduce_op == "MAX"
    reduced = by_operator["c10d::reduce_"]
    assert (reduced.reduce_op, reduced.root) == ("PRODUCT", 1)
    assert by_operator["c10d::broadcast_"].root == 1
    assert by_operator["c10d::alltoall_base_"].splits == ((1, 3), (1, 3))
    gathered = by_operator["c10d::allgather_"]
    assert [tensor.shape for tensor in gathered.inputs] == [(2,)]
    assert [tensor.shape for tensor in gathered.outputs] == [(2,), (2,)]
    assert (gathered.num_bytes, gathered.inputs[0].dtype, gathered.inputs[0].device) == (8, "float32", "cpu")
    coalesced = by_operator["c10d::allreduce_coalesced_"]
    assert (coalesced.num_inputs, coalesced.num_bytes) == (2, 20)


def test_point_to_point_is_kept_out_of_the_numbers(logs: Any) -> None:
    """A send or receive has a peer and a tag, and no number; one from any rank has no peer."""
    (first, second), _ = logs
    sent = [(entry.op, entry.seq, entry.peer, entry.tag) for entry in first.collectives if entry.is_p2p]
    received = [(entry.op, entry.seq, entry.peer, entry.tag) for entry in second.collectives if entry.is_p2p]
    assert sent == [("send", None, 1, 7), ("send", None, 1, 8)]
    assert received == [("recv", None, 0, 7), ("recv", None, None, 8)]
