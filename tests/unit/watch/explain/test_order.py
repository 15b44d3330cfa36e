# SPDX-License-Identifier: Apache-2.0
"""Sizes that differ because ranks are in other calls of a series are not said to be wrong sizes."""

from __future__ import annotations

from ddpilot.findings.finding import Finding
from ddpilot.record.flight_ring.log import Tensor
from ddpilot.watch.analysis import analyze
from tests.unit.watch.logs import FILE, Writer, alive, bucket, group_of, job


def of(*shape: int) -> dict[str, tuple[Tensor, ...]]:
    """What a collective is given."""
    return {"inputs": (Tensor(dtype="float32", shape=shape, device="cpu"),)}


def ranks() -> tuple[Writer, Writer]:
    """Two of them, in one group."""
    return Writer(0, group_of(0, 1)), Writer(1, group_of(0, 1))


def find(*writers: Writer) -> Finding:
    """The one finding."""
    (finding,) = analyze(job([alive(rank) for rank in writers], sources={FILE: ""})).findings
    return finding


def test_a_call_that_is_left_out_of_a_series_is_no_wrong_size() -> None:
    """`if p.grad is not None: all_reduce(p.grad)`, where one rank has no gradient of one parameter."""
    zero, one = ranks()
    for rank in (zero, one):
        for size in (5, 3, 2, 5, 3, 2, 5):
            rank.call("all_reduce", 9, **of(size))
    finding = find(zero.wait("all_reduce", 9, **of(3)), one.wait("all_reduce", 9, **of(2)))
    assert finding.code == "DDP202"
    assert (
        "all_reduce SUM of float32 [3] has always followed the previous call, as on rank 0; rank 1 makes" in finding.why
    )
    assert "in the same order" in finding.fix


def test_sizes_that_vary_are_no_order() -> None:
    """A number of classes, or of tokens: a size that has come before may still be wrong."""
    zero, one = ranks()
    for rank in (zero, one):
        for size in (5, 3, 5, 5, 3, 3):
            rank.call("all_reduce", 9, **of(size))
    finding = find(zero.wait("all_reduce", 9, **of(3)), one.wait("all_reduce", 9, **of(5)))
    assert finding.code == "DDP202"
    assert finding.why == "all ranks of a collective must pass the same size"


def test_calls_from_lines_that_all_ranks_use_are_a_desync() -> None:
    """One rank makes one call more than the others, and meets their next one."""
    zero, one = ranks()
    for rank in (zero, one):
        rank.call("all_reduce", 3, **of(5)).call("all_reduce", 4, **of(2))
    finding = find(zero.wait("all_reduce", 3, **of(5)), one.wait("all_reduce", 4, **of(2)))
    assert finding.code == "DDP201"
    assert "rank 0 at train.py:3, rank 1 at train.py:4" in finding.why


def test_lines_of_each_ranks_own_are_not_taken_for_an_order() -> None:
    """A leader and a worker that call from their own lines do disagree about the size."""
    zero, one = ranks()
    finding = find(zero.wait("all_reduce", 3, **of(5)), one.wait("all_reduce", 4, **of(2)))
    assert finding.code == "DDP202"


def test_gradient_buckets_of_other_sizes_are_those_of_another_model() -> None:
    """Two models of equal names, whose backward passes come in another order on one rank."""
    zero, one = ranks()
    finding = find(
        zero.wait("all_reduce", 9, ddp=bucket(), **of(50)), one.wait("all_reduce", 9, ddp=bucket(), **of(15))
    )
    assert finding.code == "DDP201"
    assert "gradients of different parameters" in finding.why
