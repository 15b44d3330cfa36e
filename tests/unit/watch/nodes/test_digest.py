# SPDX-License-Identifier: Apache-2.0
"""What one node tells another of its ranks: the same values on the other side, on its clock, and in bounded size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpilot.record.flight_ring.log import CallSite, Collective
from ddpilot.user_files import CodeLine
from ddpilot.watch.analysis import analyze
from ddpilot.watch.nodes.digest import MAX_CHARS, Digest, decode_digest, encode_digest, merge, move_clock
from ddpilot.watch.snapshot.model import RankException, RankSnapshot
from tests.unit.watch.logs import FILE, S, Writer, alive, bucket, died, group_of, job, returned

WORLD = group_of(0, 1)


def digest_of(*ranks: RankSnapshot, now_s: float = 110.0) -> Digest:
    """What a node says of `ranks`, whose calendar clock is at 10**18 when its other one is at 0."""
    return Digest(
        now_ns=int(now_s * S),
        unix_ns=10**18 + int(now_s * S),
        is_asking=True,
        ranks={rank.rank: rank for rank in ranks},
    )


def entries(rank: RankSnapshot) -> tuple[Collective, ...]:
    """Its records."""
    assert rank.log is not None
    return rank.log.collectives


def test_digest_is_the_same_on_the_other_side() -> None:
    """Records with all that they hold, stack, error and how the process ended."""
    one = Writer(1, WORLD).call("all_reduce", 5, ddp=bucket()).call("send", 6, peer=0, tag=3)
    led = CallSite(
        file=FILE, line=9, callers=(CodeLine(FILE, 3, "main", "helper()"), CodeLine(FILE, 20, "<module>", "main()"))
    )
    one.call("all_reduce", 9, at=led).call("all_reduce", 9)
    one.call("all_to_all", 6, splits=((1, 2), (2, 1))).wait("broadcast", 7, root=0, inputs=())
    error = RankException(type_name="ValueError", message="bad", traceback="Traceback")
    ranks = [
        alive(one, CodeLine(FILE, 7, "main", "dist.broadcast(x, 0)"), error=error),
        died(Writer(2, WORLD).call("barrier", 1)),
        returned(Writer(3, WORLD)),
        RankSnapshot(rank=4),
    ]
    assert decode_digest(encode_digest(digest_of(*ranks))) == digest_of(*ranks)


def test_digest_shares_values_as_a_ring_does() -> None:
    """Analysis takes one value for one group, and looks at no rank of it twice."""
    writer = Writer(0, WORLD).call("all_reduce", 5).call("all_reduce", 5)
    first, second = entries(decode_digest(encode_digest(digest_of(alive(writer)))).ranks[0])
    assert first.group is second.group
    assert first.inputs is second.inputs


def test_digest_keeps_the_newest_records_and_how_far_every_group_has_come() -> None:
    """Of a group that was not used for long the last few, in their order."""
    rare = group_of(0, 1, name="1")
    writer = Writer(0, WORLD)
    for _ in range(10):
        writer.call("all_gather", 3, group=rare)
    for _ in range(500):
        writer.call("all_reduce", 5)
    found = entries(decode_digest(encode_digest(digest_of(alive(writer)))).ranks[0])
    assert [entry.seq for entry in found if entry.op == "all_gather"] == [6, 7, 8, 9]
    assert [entry.index for entry in found[4:]] == list(range(255, 511))


@pytest.mark.parametrize("max_chars", [MAX_CHARS, 8 * 1024, 2 * 1024])
def test_digest_is_bounded(max_chars: int) -> None:
    """First fewer records, at last fewer ranks."""
    ranks = []
    for rank in range(16):
        writer = Writer(rank, group_of(*range(64)))
        for step in range(256):
            writer.call("all_reduce", step, ddp=bucket(step % 2), start_ns=100 * S + step * 7919 * (rank + 3))
        ranks.append(alive(writer, *[CodeLine(f"/lib/module{n}.py", n, f"f{n}", f"f{n + 1}(x)") for n in range(60)]))
    text = encode_digest(digest_of(*ranks), max_chars)
    assert 500 < len(text) <= max_chars
    assert decode_digest(text).ranks


@pytest.mark.parametrize("text", ["", "no digest", encode_digest(digest_of())[:-8]])
def test_digest_that_is_none_is_refused(text: str) -> None:
    """As of a node with another version."""
    with pytest.raises(ValueError, match="not a digest of a node"):
        decode_digest(text)


def test_move_clock_puts_every_time_on_this_machines_clock() -> None:
    """By the calendar clocks, which the machines have in common; here this machine has run 1,000 s longer."""
    one = Writer(1, WORLD).call("all_reduce", 5, end_ns=101 * S, pending_ns=100 * S)
    view = alive(one, CodeLine(FILE, 7, "main"), log=one.log(heartbeat_ns=108 * S, left_ns=107 * S))
    moved = move_clock(
        digest_of(view, died(Writer(2, WORLD))),
        unix_minus_monotonic_ns=10**18 - 1000 * S,
        after_ns=1109 * S,
        before_ns=1111 * S,
    )
    rank = moved.ranks[1]
    assert moved.now_ns == 1110 * S
    assert rank.log is not None
    assert rank.stack is not None
    assert (rank.log.started_ns, rank.log.heartbeat_ns, rank.log.closed_ns) == (1099 * S, 1108 * S, None)
    assert rank.log.left_ns == 1107 * S
    assert (entries(rank)[0].start_ns, entries(rank)[0].pending_ns, entries(rank)[0].end_ns) == (
        1100 * S + S // 100,
        1100 * S,
        1101 * S,
    )
    assert rank.stack.taken_ns == 1109 * S
    assert moved.ranks[2].process.ended_ns == 1105 * S


@pytest.mark.parametrize(("wrong_s", "written_s"), [(-3600, 1109), (3600, 1111)])
def test_move_clock_does_not_trust_a_calendar_that_is_wrong(wrong_s: int, written_s: int) -> None:
    """It was written after the last look and before it was read, whatever the calendar says."""
    moved = move_clock(
        digest_of(),
        unix_minus_monotonic_ns=10**18 - (1000 + wrong_s) * S,
        after_ns=1109 * S,
        before_ns=1111 * S,
    )
    assert moved.now_ns == written_s * S


def test_merge_adds_ranks_and_keeps_those_that_are_here() -> None:
    """What this node knows of its own ranks is newer."""
    here, old = alive(Writer(0, WORLD).call("barrier", 1)), alive(Writer(0, WORLD))
    there = alive(Writer(1, WORLD))
    merged = merge(replace(job([here]), world_size=2), [digest_of(old, there)])
    assert list(merged.ranks) == [0, 1]
    assert merged.ranks[0] is here
    assert merged.ranks[1].log == there.log


def test_merge_keeps_a_rank_beating_that_was_beating_when_it_was_looked_at() -> None:
    """A digest is a second old: that the rank has run no Python since then is not known."""
    zero = Writer(0, WORLD).call("all_reduce", 5).wait("barrier", 9)
    one = Writer(1, WORLD).call("all_reduce", 5)
    log = one.log(heartbeat_ns=int(108.9 * S))
    there = alive(one, CodeLine(FILE, 12, "main", "sleep(60)"), log=log)
    view = merge(replace(job([alive(zero)]), world_size=2), [digest_of(there, now_s=109.0)])
    (line,) = analyze(view).status
    assert "rank 1 has not called it: train.py:12  sleep(60)" in line


def test_ranks_of_two_nodes_are_compared() -> None:
    """One in a barrier here, one in an all_reduce there: the finding that one node would have."""
    zero = Writer(0, WORLD).call("all_reduce", 5).wait("barrier", 7)
    one = Writer(1, WORLD).call("all_reduce", 5).wait("all_reduce", 9)
    there = decode_digest(encode_digest(digest_of(alive(one))))
    (finding,) = analyze(merge(replace(job([alive(zero)]), world_size=2), [there])).findings
    (same,) = analyze(job([alive(zero), alive(one)])).findings
    assert finding == same
    assert (finding.code, len(finding.evidence)) == ("DDP201", 3)
