# SPDX-License-Identifier: Apache-2.0
"""Collectives that return at once, as NCCL's do: what a look at the ranks proves of them, and what it must not say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpilot.user_files import CodeLine
from ddpilot.watch.analysis import Analysis, analyze
from ddpilot.watch.snapshot.model import RankSnapshot
from tests.unit.watch.logs import FILE, S, Writer, alive, bucket, group_of, job, returned

WORLD = group_of(0, 1)
LATE: dict[str, Any] = {"is_watched": False}
"""Nobody looks whether it is over until the rank starts another one."""
PASSED_OVER: dict[str, Any] = {"state": "unknown", "pending_ns": 101 * S}
AT_ITEM = CodeLine(FILE, 20, "main", "print(loss.item())")
COMPUTES = CodeLine(FILE, 30, "main", "plot(history)")


def pair() -> tuple[Writer, Writer]:
    """Two ranks that have done one all_reduce together."""
    ranks = (Writer(0, WORLD), Writer(1, WORLD))
    for rank in ranks:
        rank.call("all_reduce", 1, **LATE)
    return ranks


def look(*ranks: RankSnapshot, after_s: float = 40.0) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """Codes and severities of what is found, and the status."""
    found: Analysis = analyze(job(ranks, after_s=after_s))
    return [(finding.code, finding.severity) for finding in found.findings], found.status


@pytest.mark.parametrize("more", [{}, {"ddp": bucket()}])
def test_one_of_too_many_to_follow_holds_its_rank_up_like_any_other(more: dict[str, Any]) -> None:
    """The other rank has come to its end; a collective of a graph, which nobody saw pending, proves nothing."""
    zero, one = pair()
    zero.call("all_reduce", 5, **LATE, **PASSED_OVER, **more)
    assert look(alive(zero), returned(one))[0] == [("DDP208", "error")]
    zero, one = pair()
    zero.call("all_reduce", 5, **LATE, state="unknown", **more)
    assert look(alive(zero), returned(one)) == ([], ())


def test_what_all_ranks_have_begun_is_not_called_stuck_where_there_were_too_many_to_follow() -> None:
    """Also over gloo, where somebody looks all the time, but not at these."""
    ranks = (Writer(0, WORLD), Writer(1, WORLD))
    for rank in ranks:
        rank.call("all_reduce", 5, **PASSED_OVER)
    assert look(*(alive(rank, AT_ITEM) for rank in ranks)) == ([], ())


@pytest.mark.parametrize("op", ["broadcast", "scatter"])
def test_a_root_that_computes_after_it_has_given_its_part_waits_for_nobody(op: str) -> None:
    """Its part may be over; it waits where it reads a number, or has begun what needs the others."""
    root = group_of(0, 1)
    for stack, begins_more, is_held in ((COMPUTES, False, False), (AT_ITEM, False, True), (COMPUTES, True, True)):
        zero, one = pair()
        zero.wait(op, 5, root=root.rank, **LATE)
        if begins_more:
            zero.wait("all_reduce", 6, **LATE)
        codes, status = look(alive(zero, stack), alive(one, COMPUTES))
        assert (codes == [("DDP218", "warning")]) is is_held
        assert bool(status) is is_held


@pytest.mark.parametrize("more", [LATE, {}])
def test_a_root_whose_part_is_over_waits_in_what_it_has_begun_since(more: dict[str, Any]) -> None:
    """Its broadcast is done without rank 1, which has come to neither."""
    zero, one = pair()
    zero.call("broadcast", 5, root=0, **more)
    assert look(alive(zero, COMPUTES), alive(one, COMPUTES)) == ([], ())
    zero.wait("all_reduce", 6, **more)
    codes, (status,) = look(alive(zero, COMPUTES), alive(one, COMPUTES))
    assert codes == [("DDP218", "warning")]
    assert "all_reduce (#2 of the default group)" in status


def test_a_receive_that_returned_at_once_says_nothing_about_a_rank_that_computes() -> None:
    """Whether the sender has come or not; where the rank reads a number it waits for a message that is not sent."""
    for stack, is_held in ((COMPUTES, False), (AT_ITEM, True)):
        zero, one = pair()
        one.wait("recv", 5, peer=0, tag=0, via="recv", **LATE)
        codes, status = look(alive(zero, COMPUTES), alive(one, stack))
        assert (codes == [("DDP218", "warning")]) is is_held
        assert bool(status) is is_held


def test_a_first_message_between_two_ranks_waits_in_its_call() -> None:
    """To connect takes both of them; the call is made by recording's kernels, and the sender has come to its end."""
    zero, one = pair()
    one.wait("recv", 5, peer=0, tag=0, via="recv", **LATE)
    in_call = CodeLine("/x/site-packages/ddpilot/record/collectives/kernels.py", 86, "kernel")
    assert look(returned(zero), alive(one, in_call, CodeLine(FILE, 5, "main", "dist.recv(x, 0)")))[0] == [
        ("DDP219", "error")
    ]


def test_a_message_of_several_that_run_as_one_is_the_other_side_of_a_receive() -> None:
    """`batch_isend_irecv` over NCCL gives no work for each, so that nobody sees its end."""
    zero, one = pair()
    zero.call("send", 4, peer=1, tag=0, state="unknown", **LATE)
    one.wait("recv", 5, peer=0, tag=0, via="recv", **LATE)
    assert look(alive(zero, COMPUTES), alive(one, AT_ITEM)) == ([], ())


def test_the_other_side_of_a_receive_is_known_where_messages_cannot_be_counted() -> None:
    """The rings hold the newest calls alone: a send of several that run as one counts as come, and none as missing."""
    for sends, found in ((True, []), (False, [("DDP218", "warning")])):
        zero, one = pair()
        if sends:
            zero.call("send", 4, peer=1, tag=0, state="unknown", **LATE)
        one.wait("recv", 5, peer=0, tag=0, via="recv", **LATE)
        logs = [replace(rank.log(), collectives=rank.log().collectives[1:]) for rank in (zero, one)]
        codes, _ = look(alive(zero, COMPUTES, log=logs[0]), alive(one, AT_ITEM, log=logs[1]))
        assert codes == found


def test_messages_over_nccl_have_no_tags() -> None:
    """It goes by their order alone, so that two with different tags are the two sides of one; gloo goes by tags."""
    for more, found in ((LATE, []), ({}, [("DDP219", "error")])):
        zero, one = pair()
        zero.wait("send", 4, peer=1, tag=1, via="send", **more)
        one.wait("recv", 5, peer=0, tag=2, via="recv", **more)
        assert look(alive(zero, AT_ITEM), alive(one, AT_ITEM)) == (found, ())


def test_a_pipeline_whose_batch_of_messages_lacks_its_other_side_is_seen() -> None:
    """By counting, and where its rank waits; not in a rank that computes, and not for one that went on since."""
    for stack, goes_on, is_held in ((AT_ITEM, False, True), (COMPUTES, False, False), (AT_ITEM, True, False)):
        zero, one = pair()
        for _ in range(2):
            zero.call("send", 4, peer=1, tag=0, state="unknown", **LATE)
            zero.call("recv", 4, peer=1, tag=0, state="unknown", **LATE)
        one.call("recv", 5, peer=0, tag=0, state="unknown", **LATE)
        one.call("send", 5, peer=0, tag=0, state="unknown", **LATE)
        if goes_on:
            zero.call("all_reduce", 6, state="unknown", **LATE)
        codes, status = look(alive(zero, stack), alive(one, COMPUTES))
        assert (codes == [("DDP218", "warning")]) is is_held
        assert any("rank 0 has waited" in line for line in status) is is_held


@pytest.mark.parametrize(
    ("frame", "waits"),
    [
        (CodeLine("/x/site-packages/torch/cuda/__init__.py", 9, "synchronize"), True),
        (CodeLine("/x/site-packages/torch/_tensor_str.py", 9, "_str_intern"), True),
        (CodeLine(FILE, 20, "main", "total += float(loss)"), True),
        (CodeLine("/x/site-packages/torch/nn/functional.py", 9, "linear"), False),
    ],
)
def test_a_rank_waits_for_its_device_where_it_reads_numbers_from_it(frame: CodeLine, waits: bool) -> None:
    """An asynchronous collective holds it up only there."""
    zero, one = pair()
    zero.wait("all_reduce", 5, is_async=True, **LATE)
    inner = (frame,) if frame.file == FILE else (frame, CodeLine(FILE, 20, "main", "f(loss)"))
    assert bool(look(alive(zero, *inner), alive(one, COMPUTES))[1]) is waits
