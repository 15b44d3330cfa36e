# SPDX-License-Identifier: Apache-2.0
"""Waits: what is proven, what may still end, and what is no wait at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.watch_analysis import make_log, view_of
from ddpilot.findings.display import render_text
from ddpilot.record.flight_ring.log import Collective
from ddpilot.record.journal import Entry
from ddpilot.user_files import CodeLine
from ddpilot.watch.analysis import Analysis, analyze
from ddpilot.watch.report import newest
from ddpilot.watch.snapshot.model import JobSnapshot, ProcessState, PythonStack, RankException, RankSnapshot
from tests.unit.watch.logs import FILE, S, Writer, alive, bucket, died, group_of, job, part, returned, texts_of

WORLD = group_of(0, 1)
TORCH = "/x/site-packages/torch"
IN_BARRIER = (
    CodeLine(f"{TORCH}/distributed/distributed_c10d.py", 5, "barrier"),
    CodeLine(FILE, 9, "main", "dist.barrier()"),
)
GIL: dict[str, Any] = {"heartbeat_ns": 100 * S}


def pair(**more: Any) -> tuple[Writer, Writer]:
    """Two ranks that have done one all_reduce together."""
    ranks = (Writer(0, WORLD, **more), Writer(1, WORLD, **more))
    for rank in ranks:
        rank.call("all_reduce", 1)
    return ranks


def at(line: int, text: str, *inner: CodeLine, taken_s: float = 109.0) -> PythonStack:
    """A main thread that is at a line of the user's, and below it."""
    return PythonStack(taken_ns=int(taken_s * S), frames=(*inner, CodeLine(FILE, line, "main", text)))


def codes(analysis: Analysis) -> list[tuple[str, str]]:
    """Codes and severities."""
    return [(finding.code, finding.severity) for finding in analysis.findings]


def one_waits(
    stack: PythonStack | None, *, after_s: float = 10.0, before: PythonStack | None = None, **log: Any
) -> Analysis:
    """Rank 0 waits in a barrier since 0.02 s; rank 1 is elsewhere, as its `stack` says."""
    zero, one = pair()
    zero.wait("barrier", 9)
    view = job([alive(zero), alive(one, stack=stack, log=one.log(**log))], after_s=after_s)
    earlier = job([alive(zero), alive(one, stack=before)], after_s=after_s - 2) if before is not None else None
    return analyze(view, earlier)


def test_nothing_is_said_while_all_is_well_or_has_just_begun() -> None:
    """A wait of less than two seconds is nothing."""
    zero, one = pair()
    assert analyze(job([alive(zero), alive(one)])) == analyze(job([]))
    zero.wait("barrier", 9)
    assert analyze(job([alive(zero), alive(one)], after_s=1.9)).status == ()


def test_a_rank_that_has_not_come_is_a_status_with_its_line() -> None:
    """Unproven: who waits since when in what, who is not there, and where its Python is."""
    analysis = one_waits(at(20, "time.sleep(60)"))
    (line,) = analysis.status
    assert line.startswith("rank 0 has waited 10 s in barrier (#1 of the default group) at train.py:9; ")
    assert line.endswith("rank 1 has not called it: train.py:20  time.sleep(60)")
    assert not analysis.findings
    assert analysis.is_stalled


def test_the_stacks_of_ranks_that_have_not_come_are_asked_for() -> None:
    """And not again for a second."""
    assert one_waits(None).needs_stacks == (1,)
    assert one_waits(at(20, "f()", taken_s=109.9)).needs_stacks == ()


def test_a_wait_that_has_lasted_is_a_warning_and_never_an_error() -> None:
    """After `stall_warn_s`, with the lines of both."""
    analysis = one_waits(at(20, "f()", taken_s=139), after_s=40, before=at(20, "f()", taken_s=137))
    assert codes(analysis) == [("DDP218", "warning")]
    assert analysis.findings[0].ranks == (1,)
    assert "f() (has not moved)" in str(analysis.findings)
    assert "waiting for 40 s" in analysis.findings[0].evidence[-1]


def test_a_wait_that_lasts_on_is_the_same_finding() -> None:
    """In the same words, whatever line the rank that is waited for is at by then."""
    first, later = (
        one_waits(at(line, "f()", taken_s=99 + s), after_s=s, before=at(line, "f()", taken_s=97 + s)).findings[0]
        for line, s in ((20, 40), (30, 70))
    )
    assert first.place != later.place
    assert newest([first, later]) == [later]


def test_a_wait_without_missing_ranks_counts_from_the_last_that_has_come() -> None:
    """A rank that came late leaves the others no time to end the collective: it is not one that does not end."""
    late_s = 30.0
    for after_s, found in ((late_s + 1.0, []), (late_s + 31.0, [("DDP218", "warning")])):
        zero, one = pair()
        zero.wait("barrier", 9, is_watched=True)
        one.wait("barrier", 9, is_watched=True, start_ns=100 * S + int(late_s * S))
        analysis = analyze(job([alive(zero), alive(one)], after_s=after_s))
        assert codes(analysis) == found
        assert analysis.is_stalled is bool(found)
    assert analysis.findings[0].evidence[-1] == "waiting for 31 s"


@pytest.mark.parametrize(
    ("inner", "text", "code"),
    [
        (CodeLine(f"{TORCH}/utils/data/dataloader.py", 1291, "_try_get_data"), "for x in loader:", "DDP213"),
        (CodeLine(f"{TORCH}/serialization.py", 90, "save"), "torch.save(model, p)", "DDP214"),
        (CodeLine("/usr/lib/python3.11/urllib/request.py", 9, "urlopen"), "fetch(url)", "DDP214"),
        (CodeLine(f"{TORCH}/_inductor/compile_fx.py", 9, "compile_fx"), "y = step(x)", "DDP221"),
        (CodeLine(f"{TORCH}/nn/modules/linear.py", 9, "forward"), "y = f(x)", "DDP218"),
    ],
)
def test_what_an_absent_rank_does_is_told_by_its_stack(inner: CodeLine, text: str, code: str) -> None:
    """The mechanism, not the name of anything of the user's."""
    assert codes(one_waits(at(20, text, inner, taken_s=139), after_s=40)) == [(code, "warning")]


def test_a_rank_whose_line_moves_is_slow_and_that_is_no_warning() -> None:
    """Neither is one that begins collectives of another group meanwhile."""
    analysis = one_waits(at(21, "g()", taken_s=139), after_s=40, before=at(20, "f()", taken_s=137))
    assert codes(analysis) == [("DDP217", "info")]
    assert "(moves)" in analysis.status[0]


def test_a_busy_processor_proves_nothing() -> None:
    """Its line has not moved: it may spin."""
    zero, one = pair()
    zero.wait("barrier", 9)
    looks = []
    for later_s in (1.0, 3.0):
        process = ProcessState(pid=1, state="running", os_state="R")
        stack = at(20, "f()", taken_s=136 + later_s)
        looks.append(job([alive(zero), alive(one, stack=stack, process=process)], after_s=36 + later_s))
    assert codes(analyze(looks[1], looks[0])) == [("DDP218", "warning")]


def test_python_that_does_not_run_is_said() -> None:
    """C code holds its lock, as the heartbeat shows."""
    assert "has run no Python code for 10 s" in one_waits(None, **GIL).status[0]


def test_a_stopped_process_is_said() -> None:
    """By Ctrl-Z or a debugger."""
    zero, one = pair()
    zero.wait("barrier", 9)
    process = ProcessState(pid=1, state="running", os_state="T")
    assert "rank 1 is stopped" in analyze(job([alive(zero), alive(one, process=process)])).status[0]


def test_a_rank_that_has_returned_is_proof_at_once() -> None:
    """With the guard that the collective is behind."""
    source = "x = 1\n" * 7 + "if rank == 0:\n    dist.barrier()\n"
    zero, one = pair(texts=texts_of(source))
    view = job([alive(zero.wait("barrier", 9)), returned(one)], after_s=0.1, sources={FILE: source})
    (finding,) = analyze(view).findings
    assert (finding.code, finding.ranks) == ("DDP220", (0,))
    assert finding.summary == "rank 1 has returned, and rank 0 waits for it in barrier (#1 of the default group)"
    assert "its last was #0: all_reduce, train.py:1" in "\n".join(finding.evidence)


def test_a_rank_that_left_the_loop_and_returned_is_uneven_data() -> None:
    """It has been in the loop where the other one is."""
    source = "for x in loader:\n    y.backward()\n"
    zero, one = (Writer(rank, WORLD, texts=texts_of(source)) for rank in (0, 1))
    for rank in (zero, one):
        rank.call("all_reduce", 2, ddp=bucket())
    view = job([alive(zero.wait("all_reduce", 2, ddp=bucket())), returned(one)], sources={FILE: source})
    assert [(each.code, each.ranks) for each in analyze(view).findings] == [("DDP207", (1,))]


EPOCHS = """\
def run_epoch():
    for x in loader:
        model(x).backward()
for epoch in range(9):
    run_epoch()
    if stopper(validate()):
        break
"""


def passes(*of_loaders: tuple[int, int]) -> tuple[Entry, ...]:
    """Notes of loaders that were begun to be read: the loader and the how manieth time."""
    return tuple(
        Entry(index=index, time_ns=0, kind="loader_pass", values={"loader": loader, "pass": number})
        for index, (loader, number) in enumerate(of_loaders, 1)
    )


@pytest.mark.parametrize(
    ("here", "gone", "code"),
    [
        ((), (), "DDP208"),
        (((7, 1), (7, 2)), ((7, 1),), "DDP208"),
        (((7, 1), (7, 2)), ((7, 1), (7, 2)), "DDP207"),
        (((7, 1),), ((7, 1), (7, 2)), "DDP207"),
        (((7, 1), (8, 1)), ((7, 1),), "DDP208"),
        (((7, 1), (8, 1)), ((7, 1), (8, 1)), "DDP207"),
    ],
    ids=["no notes", "read again", "same pass", "ahead", "a new loader", "the same loaders"],
)
def test_a_break_of_a_loop_around_the_one_over_data_is_told_from_uneven_data(here: Any, gone: Any, code: str) -> None:
    """A rank that waits in a pass which the other one never began has not read more batches than that one."""
    zero, one = (Writer(rank, WORLD, texts=texts_of(EPOCHS)) for rank in (0, 1))
    for rank in (zero, one):
        rank.call("all_reduce", 3, ddp=bucket(), function="run_epoch", led=[(5, "<module>")])
    zero.wait("all_reduce", 3, ddp=bucket(), function="run_epoch", led=[(5, "<module>")])
    ended = replace(returned(one), journal=passes(*gone))
    view = job([alive(zero, journal=passes(*here)), ended], sources={FILE: EPOCHS})
    (finding,) = analyze(view).findings
    assert (finding.code, finding.ranks) == (code, (1,))
    said = "`if stopper(validate()): break` (train.py:7)" if code == "DDP208" else "`for x in loader:` (train.py:2)"
    assert said in finding.why


def test_ranks_that_talk_may_have_agreed_on_when_to_stop() -> None:
    """By a collective of the program's own: then the loop over data is what may have ended for one alone."""
    zero, one = (Writer(rank, WORLD, texts=texts_of(EPOCHS)) for rank in (0, 1))
    for rank in (zero, one):
        rank.call("all_reduce", 3, ddp=bucket(), function="run_epoch", led=[(5, "<module>")])
        rank.call("broadcast", 6)
        rank.call("all_reduce", 3, ddp=bucket(), function="run_epoch", led=[(5, "<module>")])
    zero.wait("all_reduce", 3, ddp=bucket(), function="run_epoch", led=[(5, "<module>")])
    (finding,) = analyze(job([alive(zero), returned(one)], sources={FILE: EPOCHS})).findings
    assert (finding.code, finding.ranks) == ("DDP207", (1,))


def test_a_rank_that_returned_without_ever_being_there_has_finished_early() -> None:
    """Nothing in the source says why."""
    zero, one = pair()
    view = job([alive(zero.wait("barrier", 9)), returned(one)])
    assert [(each.code, each.ranks) for each in analyze(view).findings] == [("DDP208", (1,))]


def test_a_death_is_told_with_those_who_wait() -> None:
    """And its signal."""
    zero, one = pair()
    (finding,) = analyze(job([alive(zero.wait("barrier", 9)), died(one)])).findings
    assert (finding.code, finding.ranks) == ("DDP209", (1,))
    assert finding.summary.startswith("rank 1 died of SIGKILL, and rank 0 waits for it in barrier")
    assert "memory" in finding.why


def test_consequences_of_a_death_are_no_deaths() -> None:
    """One rank raises; the others lose their connections, and the launcher ends the last one."""
    group = group_of(0, 1, 2)
    zero, one, two = (Writer(rank, group).call("all_reduce", 1) for rank in range(3))
    closed = RankException(type_name="RuntimeError", message="[pair.cc:553] Connection closed by peer [127.0.0.1]:9")
    own = RankException(
        type_name="ValueError", message="bad sample", traceback=f'  File "{FILE}", line 7, in main\n    f()\n'
    )
    ranks = [
        alive(zero.call("barrier", 9, state="failed"), error=closed),
        alive(one, error=own),
        died(two.wait("barrier", 9), "SIGKILL"),
    ]
    (finding,) = analyze(job(ranks)).findings
    assert (finding.code, finding.ranks) == ("DDP209", (1,))
    assert "raised ValueError: bad sample" in finding.summary
    assert finding.place is not None
    assert (finding.place.line, finding.place.text) == (7, "f()")


@pytest.mark.parametrize(("lived_s", "blamed"), [(106.0, 0), (105.0, 1)])
def test_a_rank_that_a_launcher_ends_after_an_error_is_not_the_cause_of_it(lived_s: float, blamed: int) -> None:
    """A download of rank 0 fails, and torchrun ends rank 1, whose signal nobody sees from outside."""
    zero, one = pair()
    unseen = ProcessState(pid=1, state="ended")
    reset = RankException(type_name="ConnectionResetError", message="[Errno 104] Connection reset by peer")
    first = alive(zero, log=zero.log(closed_ns=105 * S), process=unseen, error=reset)
    last = alive(one, log=one.log(heartbeat_ns=int(lived_s * S)), process=unseen)
    (finding,) = analyze(job([first, last])).findings
    assert (finding.code, finding.ranks) == ("DDP209", (blamed,))
    assert ("raised ConnectionResetError" in finding.summary) == (blamed == 0)


def test_a_death_before_anybody_waits_is_told_too() -> None:
    """With what it did last."""
    zero, one = pair()
    (finding,) = analyze(job([alive(zero), died(one, "SIGSEGV", -11)])).findings
    assert (finding.code, finding.ranks, finding.summary) == ("DDP209", (1,), "rank 1 died of SIGSEGV")


def test_an_orderly_end_of_all_ranks_is_nothing() -> None:
    """Also where an asynchronous collective was never waited for, on one rank only."""
    zero, one = pair()
    zero.wait("all_reduce", 9, is_async=True)
    assert analyze(job([returned(zero), returned(one)])) == analyze(job([]))


def test_the_abort_after_a_mismatch_is_not_a_second_finding() -> None:
    """gloo ends a process whose tensor has another size."""
    zero, one = pair()
    zero.wait("all_reduce", 3)
    one.wait("all_reduce", 3, inputs=(replace(zero.log().collectives[0].inputs[0], shape=(9,)),))
    (finding,) = analyze(job([died(zero, "SIGABRT", -6), died(one, "SIGABRT", -6)])).findings
    assert finding.code == "DDP202"
    assert "died of SIGABRT" in "\n".join(finding.evidence)


def test_groups_in_different_orders_are_a_circle() -> None:
    """Proven, for each waits for the other."""
    zero, one = pair()
    first, second = group_of(0, 1, name="1"), group_of(0, 1, name="2")
    view = job([alive(zero.wait("all_reduce", 5, group=first)), alive(one.wait("all_reduce", 6, group=second))])
    (finding,) = analyze(view).findings
    assert (finding.code, finding.ranks) == ("DDP206", (0, 1))
    assert "rank 0 waits for rank 1, rank 1 waits for rank 0" in finding.why


def test_a_circle_is_not_proven_where_another_thread_may_help() -> None:
    """A rank that starts collectives from two threads may still come."""
    zero, one = pair()
    first, second = group_of(0, 1, name="1"), group_of(0, 1, name="2")
    one.call("all_reduce", 2, group=group_of(0, 1, name="3"), thread=2)
    zero.call("all_reduce", 2, group=group_of(0, 1, name="3"))
    view = job([alive(zero.wait("all_reduce", 5, group=first)), alive(one.wait("all_reduce", 6, group=second))])
    assert not analyze(view).findings


def test_ranks_that_wait_for_one_that_waits_are_not_told_apart_from_it() -> None:
    """The status names the one that all of it hangs on."""
    world, some = group_of(0, 1, 2), group_of(1, 2, name="1")
    zero, one, two = (Writer(rank, world).call("all_reduce", 1) for rank in range(3))
    ranks = [alive(zero.wait("barrier", 9)), alive(one.wait("barrier", 8, group=some)), alive(two, stack=at(3, "f()"))]
    analysis = analyze(job(ranks))
    assert [line.partition(";")[0].partition(" at ")[2] for line in analysis.status] == ["train.py:9", "train.py:8"]
    assert all("rank 2 has not called it: train.py:3  f()" in line for line in analysis.status)


@pytest.mark.parametrize(("op", "other"), [("recv", "recv"), ("send", "send")])
def test_both_sides_of_a_message_that_wait_for_each_other_are_a_circle(op: str, other: str) -> None:
    """Both receive first, or both send first."""
    zero, one = pair()
    waits = [zero.wait(op, 5, peer=1, tag=0), one.wait(other, 5, peer=0, tag=0)]
    for wait in waits:
        assert wait.log().collectives[-1].is_p2p
    view = job([alive(each, *IN_BARRIER) for each in waits])
    assert codes(analyze(view)) == [("DDP219", "error")]


def test_a_message_that_has_both_sides_is_being_sent() -> None:
    """Also with a receive from any; a tag that differs is another message."""
    zero, one = pair()
    zero.wait("send", 5, peer=1, tag=3)
    for tag, found in ((3, []), (4, [("DDP219", "error")])):
        receiver = Writer(1, WORLD).call("all_reduce", 1).wait("recv", 6, peer=0, tag=tag)
        assert codes(analyze(job([alive(zero, *IN_BARRIER), alive(receiver, *IN_BARRIER)]))) == found
    anyone = one.wait("recv", 6, peer=None, tag=3)
    assert not analyze(job([alive(zero, *IN_BARRIER), alive(anyone, *IN_BARRIER)])).findings


def messages(num_taken: int) -> Analysis:
    """Rank 0 has sent twice, the second time 32 bytes, and is in a barrier; rank 1 died with room for `num_taken`."""
    zero, one = pair()
    zero.call("send", 2, peer=1, tag=0).call("send", 3, peer=1, tag=0, num_bytes=32).wait("barrier", 5)
    one.call("recv", 2, peer=0, tag=0).wait("recv", 4, peer=0, tag=0, num_bytes=num_taken)
    return analyze(job([alive(zero), died(one, "SIGABRT", -6)], after_s=0.1))


def test_a_message_with_more_than_there_is_room_for_is_a_size_mismatch() -> None:
    """The sender is done with it, and gloo has aborted the receiver."""
    (finding,) = messages(16).findings
    assert (finding.code, finding.severity, finding.ranks) == ("DDP202", "error", (0, 1))
    assert finding.summary == "rank 0 sends 32 bytes to rank 1, which has room for 16"
    assert "died of SIGABRT" in "\n".join(finding.evidence)


def test_room_that_a_message_does_not_fill_is_a_warning() -> None:
    """It may be meant, and ends nobody: why the rank died is said too."""
    found = [(finding.code, finding.severity) for finding in messages(64).findings]
    assert ("DDP202", "warning") in found
    assert "error" in {severity for _, severity in found}


def test_messages_are_not_compared_where_one_is_forgotten() -> None:
    """The next one would meet another: the oldest is still held, and one in the middle is not."""
    zero, one = pair()
    for rank, op in ((zero, "send"), (one, "recv")):
        for num_bytes in (16, 32, 64):
            rank.call(op, 2, peer=1 - rank.rank, tag=0, num_bytes=num_bytes)
    first, _, last = one.log().collectives[-3:]
    log = one.log(collectives=(*one.log().collectives[:-3], first, last))
    assert not analyze(job([alive(zero), alive(one, log=log)])).findings


def test_a_message_that_fits_is_not_why_a_rank_died() -> None:
    """As many bytes on both sides."""
    assert "DDP202" not in {finding.code for finding in messages(32).findings}


def test_a_stage_that_waits_for_a_message_is_only_a_status() -> None:
    """The stage before it computes."""
    zero, one = pair()
    analysis = analyze(job([alive(zero, stack=at(3, "f()")), alive(one.wait("recv", 6, peer=0, tag=0), *IN_BARRIER)]))
    assert not analysis.findings
    assert "rank 0 has not called it" in analysis.status[0]


@pytest.mark.parametrize(
    ("begin", "told"),
    [
        ("r, w = dist.get_rank(), 2", "the send at train.py:3 is inside `if r == 0:` (train.py:2)"),
        ("r, w = setup()", ""),
    ],
)
@pytest.mark.parametrize("num_rounds", [0, 1])
def test_a_loop_with_messages_that_only_one_rank_runs_has_not_ended_on_the_other(
    begin: str, told: str, num_rounds: int
) -> None:
    """The condition around it is the reason, where it is known to ask for the rank; else no reason is given."""
    source = f"{begin}\nif r == 0:\n    for x in xs: dist.send(x, 1)\ndist.barrier()\n"
    zero, one = (Writer(rank, WORLD, texts=texts_of(source)) for rank in (0, 1))
    for rank in (zero, one) * num_rounds:
        rank.call("barrier", 4)
    waits = [zero.wait("send", 3, peer=1, tag=0, via="send"), one.wait("barrier", 4)]
    (finding,) = analyze(job([alive(each, *IN_BARRIER) for each in waits], sources={FILE: source})).findings
    assert finding.code == "DDP219"
    assert told in finding.why
    assert "ended earlier" not in finding.why


def test_a_message_of_a_destroyed_group_does_not_answer_one_of_the_group_that_has_its_name() -> None:
    """As a session's rebuild leaves behind: the receiver still waits, and the status says so."""
    zero, one = pair()
    one.wait("send", 5, peer=0, tag=0)
    zero.wait("recv", 6, peer=1, tag=0, group=group_of(0, 1, incarnation=2))
    analysis = analyze(job([alive(zero, *IN_BARRIER), alive(one)]))
    assert not analysis.findings
    assert "rank 0 has waited" in analysis.status[0]
    assert "rank 1 has not called it" in analysis.status[0]


def test_an_asynchronous_collective_that_nobody_waits_for_may_stay() -> None:
    """Whether it is waited for is told by the stack, and only that is asked for."""
    zero, one = pair()
    zero.wait("all_reduce", 5, is_async=True)
    unknown = analyze(job([alive(zero), alive(one, stack=at(3, "f()"))]))
    assert (unknown.status, unknown.needs_stacks) == ((), (0,))
    elsewhere = analyze(job([alive(zero, stack=at(7, "compute()")), alive(one, stack=at(3, "f()"))], after_s=60))
    assert (elsewhere.status, codes(elsewhere)) == ((), [])
    waiting = analyze(job([alive(zero, stack=at(7, "work.wait()")), alive(one, stack=at(3, "f()"))]))
    assert waiting.status


def test_nccl_collectives_that_all_have_begun_may_be_over() -> None:
    """Nobody asks whether its newest are; one that lacks a rank cannot be."""
    zero, one = pair()
    for rank in (zero, one):
        rank.wait("all_reduce", 5, is_watched=False)
    assert analyze(job([alive(zero), alive(one)], after_s=90)) == analyze(job([]))
    zero.wait("all_reduce", 5, is_watched=False)
    assert analyze(job([alive(zero), alive(one, stack=at(3, "f()"))], after_s=9)).status


def test_all_have_come_and_it_does_not_end() -> None:
    """Then it is their connection, which is a warning in the end."""
    zero, one = pair()
    view = job([alive(rank.wait("barrier", 9)) for rank in (zero, one)], after_s=40)
    analysis = analyze(view)
    assert "all ranks have called it, and it does not complete" in analysis.status[0]
    assert codes(analysis) == [("DDP218", "warning")]


def test_ranks_of_another_node_are_not_held_to_be_missing() -> None:
    """What is not seen here is said so."""
    zero = Writer(0, WORLD).call("all_reduce", 1).wait("barrier", 9)
    view = JobSnapshot(world_size=2, ranks={0: alive(zero)}, now_ns=110 * S)
    analysis = analyze(view)
    assert "the state of rank 1 is not known here" in analysis.status[0]
    assert not analysis.findings


def test_a_group_that_others_do_not_make_is_proven() -> None:
    """One rank is in new_group, which needs the one that waits for it in the default group."""
    zero, one = pair()
    inner = CodeLine(f"{TORCH}/distributed/distributed_c10d.py", 6056, "new_group")
    view = job([alive(zero, stack=at(4, "g = dist.new_group([0, 1])", inner)), alive(one.wait("barrier", 9))])
    (finding,) = analyze(view).findings
    assert (finding.code, finding.severity, finding.ranks) == ("DDP215", "error", (0,))


def test_a_group_that_others_do_not_make_is_proven_also_where_they_wait_in_a_part_of_the_world() -> None:
    """All ranks have to call new_group, members or not."""
    world, some = group_of(0, 1, 2), group_of(0, 1, name="1")
    zero, one, two = (Writer(rank, world).call("all_reduce", 1) for rank in range(3))
    inner = CodeLine(f"{TORCH}/distributed/distributed_c10d.py", 6056, "new_group")
    making = alive(one, stack=at(4, "g = dist.new_group([1, 2])", inner))
    view = job([alive(zero.wait("all_reduce", 9, group=some)), making, alive(two, stack=at(7, "work()"))])
    (finding,) = analyze(view).findings
    assert (finding.code, finding.severity, finding.ranks) == ("DDP215", "error", (1,))


def test_a_rank_that_leaves_its_group_is_proven_to_be_missed() -> None:
    """It has called destroy_process_group while others are in a collective."""
    zero, one = pair()
    inner = CodeLine(f"{TORCH}/distributed/distributed_c10d.py", 2000, "destroy_process_group")
    view = job([alive(zero, stack=at(4, "dist.destroy_process_group()", inner)), alive(one.wait("barrier", 9))])
    assert codes(analyze(view)) == [("DDP216", "error")]
    before = alive(zero, stack=replace(at(3, "dist.all_reduce(x, group=pair)"), taken_ns=107 * S))
    earlier = replace(view, ranks={**view.ranks, 0: before}, now_ns=108 * S)
    assert not analyze(view, earlier).findings  # it has come there since: by the barrier, for all that is known


BARRIER = """\
for step in range(9):
    dist.all_reduce(x)
if rank == 1:
    dist.destroy_process_group()
else:
    dist.barrier()
"""


def gone(left_s: float, closed_s: float | None = None, **more: Any) -> Analysis:
    """Rank 0 waits in a barrier since 100 s; rank 1 has left the groups then, and its process lives at 110 s."""
    zero, one = (Writer(rank, group_of(0, 1), texts=texts_of(BARRIER)) for rank in range(2))
    zero.call("all_reduce", 2).wait("barrier", 6)
    one.call("all_reduce", 2, **more)
    closed_ns = None if closed_s is None else int(closed_s * S)
    log = one.log(left_ns=int(left_s * S), closed_ns=closed_ns)
    return analyze(job([alive(zero), alive(one, log=log)], sources={FILE: BARRIER}))


@pytest.mark.parametrize(
    ("closed_s", "words"), [(None, "has destroyed its process groups"), (103.0, "has reached its end")]
)
def test_a_rank_that_has_left_the_group_is_proof_while_its_process_lives(closed_s: float | None, words: str) -> None:
    """It sleeps, saves, or Python takes long to end: nobody can come to the group from there."""
    (finding,) = gone(102.0, closed_s).findings
    assert (finding.code, finding.severity, finding.ranks) == ("DDP220", "error", (0,))
    assert words in finding.summary
    assert "`if rank == 1:` (train.py:3)" in finding.why


def test_a_rank_that_has_just_left_may_have_an_error_to_tell() -> None:
    """As in a `finally` that destroys the group; what ended it is known soon."""
    assert not gone(109.0).findings


@pytest.mark.parametrize(
    ("left_s", "closed_s", "codes"), [(109.6, None, ["DDP220"]), (109.9, None, []), (109.6, 109.6, [])]
)
def test_a_rank_that_has_left_is_named_sooner_when_others_have_lost_it(
    left_s: float, closed_s: float | None, codes: list[str]
) -> None:
    """Their error says that its connections are closed; only where it may still end by an error that is waited for."""
    zero, one = (Writer(rank, group_of(0, 1), texts=texts_of(BARRIER)).call("all_reduce", 2) for rank in range(2))
    error = RankException(type_name="RuntimeError", message="gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    process = ProcessState(pid=4000, state="ended", exitcode=1, ended_ns=int(109.7 * S))
    cut_off = alive(zero.wait("barrier", 6, state="failed"), process=process, error=error)
    closed_ns = None if closed_s is None else int(closed_s * S)
    gone = alive(one, log=one.log(left_ns=int(left_s * S), closed_ns=closed_ns))
    assert [each.code for each in analyze(job([cut_off, gone], sources={FILE: BARRIER})).findings] == codes


def test_a_rank_that_has_made_its_groups_anew_has_left_none_that_it_has_not_used() -> None:
    """Others may be the first in the new group."""
    assert not gone(102.0, group=group_of(0, 1, name="1")).findings


def rendezvous(*others: RankSnapshot, after_s: float) -> Analysis:
    """Rank 0 is in init_process_group."""
    inner = CodeLine(f"{TORCH}/distributed/rendezvous.py", 9, "_env_rendezvous_handler")
    stack = replace(at(2, "dist.init_process_group()", inner), taken_ns=int((100 + after_s) * S))
    return analyze(job([alive(Writer(0, WORLD), stack=stack), *others], after_s=after_s))


def test_a_group_that_is_not_complete_says_who_is_missing() -> None:
    """Nothing while ranks may be importing, a status, then a warning; an error where one of them is gone."""
    elsewhere = alive(Writer(1, WORLD), stack=at(7, "download()"))
    assert not rendezvous(elsewhere, after_s=8).status
    early = rendezvous(elsewhere, after_s=12)
    assert early.status == ("1 of 2 ranks have joined the group; rank 1 has not joined it: train.py:7  download()",)
    assert not early.findings
    assert codes(rendezvous(elsewhere, after_s=40)) == [("DDP215", "warning")]
    gone = rendezvous(returned(Writer(1, WORLD)), after_s=6)
    assert [(each.code, each.severity, each.ranks) for each in gone.findings] == [("DDP215", "error", (1,))]


def test_a_rank_that_is_not_known_here_is_waited_for_too() -> None:
    """It runs on a node that has not been heard of yet, or has not been enabled: nothing is recorded of it here."""
    inner = CodeLine(f"{TORCH}/distributed/rendezvous.py", 9, "_env_rendezvous_handler")
    stack = replace(at(2, "dist.init_process_group()", inner), taken_ns=140 * S)
    alone = replace(job([alive(Writer(0, WORLD), stack=stack)], after_s=40), world_size=2)
    analysis = analyze(alone)
    assert analysis.status == ("1 of 2 ranks have joined the group",)
    assert [(each.code, each.severity, each.ranks) for each in analysis.findings] == [("DDP215", "warning", (1,))]


ENTERING = CodeLine("/site-packages/ddpilot/group/creation.py", 41, "form_group")


def entering(after_s: float, *, others_returned: bool = True, left_s: float | None = None) -> JobSnapshot:
    """A session's cell that began at 200 s: rank 0 enters the process group at its first collective."""
    one, two = Writer(0, WORLD).call("barrier", 1), Writer(1, WORLD).call("barrier", 1)
    stack = replace(at(2, "dist.barrier()", ENTERING), taken_ns=int((200 + after_s) * S))
    left_ns = None if left_s is None else int(left_s * S)
    log = one.log(left_ns=left_ns) if left_ns else Writer(0, WORLD).log()
    other = alive(two if left_ns else Writer(1, WORLD), returned=others_returned)
    return job([alive(one, stack=stack, log=log), other], after_s=100 + after_s, since_ns=200 * S)


@pytest.mark.parametrize(("left_s", "why"), [(None, "entered at the first collective"), (150.0, "rank 1 did not;")])
def test_a_rank_that_enters_the_group_alone_in_a_cell_is_said_within_seconds(left_s: float | None, why: str) -> None:
    """The others have come to the end of the cell, in their old group or in none."""
    (finding,) = analyze(entering(3, left_s=left_s), entering(1.5, left_s=left_s)).findings
    assert (finding.code, finding.severity, finding.ranks) == ("DDP215", "error", (1,))
    assert finding.summary == "rank 0 waits for rank 1 to enter the process group"
    assert why in finding.why


def test_a_rank_that_may_be_about_to_be_in_the_group_is_not_accused() -> None:
    """The other one returned less than a second before the look, or has not returned."""
    assert not analyze(entering(3)).findings
    assert not analyze(entering(3), entering(1.5, others_returned=False)).findings
    assert not analyze(entering(3), entering(2.5)).findings
    busy = analyze(entering(3, others_returned=False), entering(1.5, others_returned=False))
    assert not busy.findings
    assert busy.status[0].startswith("1 of 2 ranks have joined the group")


def test_a_rank_that_imports_is_not_warned_of() -> None:
    """However long that takes: the status says so, and a rank that is gone is an error all the same."""
    inner = CodeLine("<frozen importlib._bootstrap>", 9, "_find_and_load")
    imports = alive(Writer(1, WORLD), stack=at(3, "import transformers", inner))
    said = rendezvous(imports, after_s=400)
    assert said.status == ("1 of 2 ranks have joined the group; rank 1 is importing: train.py:3  import transformers",)
    assert not said.findings
    starts = replace(imports, log=None, stack=None)
    said = rendezvous(starts, after_s=400)
    assert said.status == ("1 of 2 ranks have joined the group; rank 1 has not imported torch yet",)
    assert not said.findings
    begun = replace(imports, log=Writer(1, WORLD).log(started_ns=110 * S), stack=None)
    assert not rendezvous(begun, after_s=39).findings
    assert codes(rendezvous(begun, after_s=41)) == [("DDP215", "warning")]
    assert codes(rendezvous(starts, alive(Writer(2, WORLD), stack=at(7, "download()")), after_s=40)) == [
        ("DDP215", "warning")
    ]


def test_a_cell_that_imports_on_one_rank_has_as_long_as_a_start() -> None:
    """Rank 0 has what it imports already."""
    inner = CodeLine("<frozen importlib._bootstrap>", 9, "_find_and_load")

    def said(after_s: float) -> tuple[str, ...]:
        cell = entering(after_s, others_returned=False)
        imports = replace(cell.ranks[1], stack=at(3, "import transformers", inner))
        return analyze(replace(cell, ranks={0: cell.ranks[0], 1: imports})).status

    assert not said(8)
    assert said(12) == ("1 of 2 ranks have joined the group; rank 1 is importing: train.py:3  import transformers",)


def test_a_start_of_many_ranks_takes_one_short_line() -> None:
    """Some are importing, some wait for the rest."""
    importing = [alive(Writer(rank, group_of(*range(32)))) for rank in range(1, 32)]
    assert rendezvous(*importing, after_s=12).status == ("1 of 32 ranks have joined the group",)


def test_a_rank_that_has_ended_since_the_other_was_looked_at_has_not_stayed_away() -> None:
    """Its ring was read later: it may have joined, worked with the other one, and left."""
    world = group_of(0, 1)
    ended = replace(
        returned(Writer(1, world)), process=ProcessState(pid=1, state="ended", exitcode=0, ended_ns=104 * S)
    )
    late = rendezvous(ended, after_s=3)
    assert (late.status, list(late.findings)) == ((), [])
    met = Writer(1, world).call("all_reduce", 3)
    assert not rendezvous(alive(met, log=met.log(closed_ns=101 * S)), after_s=12).status


@pytest.mark.parametrize(("left_s", "expected"), [(None, []), (100.0, [("DDP215", "warning")])])
def test_a_group_that_all_make_and_that_does_not_come_is_said(left_s: float | None, expected: list[Any]) -> None:
    """Such as one that is made anew on the store of the one before; before the first it may just have begun."""
    inner = CodeLine(f"{TORCH}/distributed/distributed_c10d.py", 9, "init_process_group")
    left_ns = None if left_s is None else int(left_s * S)

    def look(after_s: float) -> JobSnapshot:
        stack = replace(at(2, "dist.init_process_group()", inner), taken_ns=int((100 + after_s) * S))
        ranks = [Writer(rank, WORLD) for rank in range(2)]
        return job([alive(rank, stack=stack, log=rank.log(left_ns=left_ns)) for rank in ranks], after_s=after_s)

    assert not analyze(look(3), look(2)).status
    late = analyze(look(40), look(39))
    assert "all ranks are in init_process_group at train.py:2" in late.status[0]
    assert codes(late) == expected


def vacant(*asked: tuple[int, int], after_s: float = 3, is_closed: bool = True, stop: bool = False) -> Analysis:
    """Each rank is in init_process_group, and asks for that world size and that rank; with `stop` no more."""
    inner = CodeLine(f"{TORCH}/distributed/distributed_c10d.py", 9, "init_process_group")
    stack = replace(at(2, "dist.init_process_group()", inner), taken_ns=int((100 + after_s) * S))
    ranks = []
    for rank, (world_size, number) in enumerate(asked):
        asks: dict[str, Any] = {"entering_ns": 100 * S, "asked_world_size": world_size, "asked_rank": number}
        writer = Writer(rank, WORLD)
        here = alive(writer, stack=stack, log=writer.log(is_closed=is_closed, **asks))
        ranks.append(replace(here, process=died(writer, "SIGTERM", -15).process) if stop else here)
    return analyze(job(ranks, after_s=after_s))


@pytest.mark.parametrize(
    ("asked", "missing", "why"),
    [
        (((3, 0), (3, 1)), "rank 2", "the group needs 3 ranks, and 2 were started"),
        (((2, 0), (2, 0)), "rank 1", "several use the same one"),
    ],
)
@pytest.mark.parametrize("stop", [False, True])
def test_a_group_that_the_ranks_cannot_fill_is_proven(
    asked: tuple[tuple[int, int], ...], missing: str, why: str, stop: bool
) -> None:
    """Too large a world size, or a number twice; also when the ranks were ended because of it."""
    analysis = vacant(*asked, stop=stop)
    (finding,) = analysis.findings
    assert (finding.code, finding.severity, finding.ranks) == ("DDP105", "error", (0, 1))
    assert finding.summary == f"ranks 0,1 wait in init_process_group, and no process is {missing}"
    assert why in finding.why
    assert finding.place is not None
    assert finding.place.line == 2
    assert [f"no process is {missing}; ranks 0,1 wait" in line for line in analysis.status] == [True] * (not stop)


def test_a_group_that_others_may_fill_is_a_status_and_then_a_warning() -> None:
    """Such as a process that a rank has started."""
    early = vacant((3, 0), (3, 1), is_closed=False)
    assert "no process is rank 2" in early.status[0]
    assert not early.findings
    late = vacant((3, 0), (3, 1), is_closed=False, after_s=40)
    assert codes(late) == [("DDP105", "warning")]


def test_a_group_that_is_about_to_be_complete_says_nothing() -> None:
    """All numbers are somebody's; or the last rank has just come."""
    for analysis in (vacant((2, 1), (2, 0)), vacant((3, 0), (3, 1), after_s=1)):
        assert not analysis.findings
        assert not analysis.status


def test_buffers_that_only_one_rank_broadcasts_are_named_when_the_other_returned() -> None:
    """From the traceback of an error, where no stack is left."""
    source = "def validate():\n    model(x)\nif rank == 0:\n    validate()\n"
    zero, one = (Writer(rank, WORLD, texts=texts_of(source)).call("all_reduce", 1) for rank in (0, 1))
    zero.call("broadcast", 2, ddp=part("buffers"), state="failed", function="validate")
    text = f'  File "{FILE}", line 4, in <module>\n    validate()\n  File "{FILE}", line 2, in validate\n    model(x)\n'
    error = RankException(type_name="RuntimeError", message="Connection closed by peer", traceback=text)
    (finding,) = analyze(job([alive(zero, error=error), returned(one)], sources={FILE: source})).findings
    assert (finding.code, finding.ranks) == ("DDP211", (0,))
    assert "inside `if rank == 0:` (train.py:3)" in finding.why


def test_thousands_of_ranks_fit_one_screen() -> None:
    """Whatever is wrong with how many of them; what it costs is measured by benchmarks/watch_analysis.py."""
    ranks = tuple(range(256))
    logs = [make_log(rank, ranks, 8, -1) for rank in ranks]
    for log in logs[::2]:
        last = log.collectives[-1]
        assert isinstance(last, Collective)
        odd = replace(last, line=replace(last.line, line=last.index + log.rank), op="barrier")  # type: ignore[type-var]
        logs[log.rank] = replace(log, collectives=(*log.collectives[:-1], odd))
    text = render_text(analyze(view_of(logs)).findings, 120)
    assert len(text.splitlines()) <= 24
    assert "and 121 more lines like these" in text


def test_an_exchange_whose_last_send_was_forgotten_names_the_receive() -> None:
    """By counting: what rank 1 sent was received, though nobody has waited for that, and its last receive was not."""
    zero, one = pair()
    for rank in (zero, one):
        for _ in range(2):
            rank.call("recv", 4, peer=1 - rank.rank, tag=0).call("send", 5, peer=1 - rank.rank, tag=0)
    zero.call("recv", 4, peer=1, tag=0)
    one.call("recv", 4, peer=0, tag=0).wait("send", 5, peer=0, tag=0)
    error = RankException(
        type_name="RuntimeError", message="[/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    )
    (finding,) = analyze(job([returned(zero), replace(alive(one), error=error)])).findings
    assert (finding.code, finding.ranks) == ("DDP219", (0,))
    assert "rank 1 waits for it in recv" in finding.summary


def test_tags_that_differ_are_the_reason_of_a_circle() -> None:
    """And not who is first."""
    zero, one = pair()
    ranks = [zero.wait("recv", 5, peer=1, tag=1), one.wait("send", 6, peer=0, tag=2)]
    (finding,) = analyze(job([alive(each, *IN_BARRIER) for each in ranks])).findings
    assert finding.code == "DDP219"
    assert "the send has tag 2 and the recv tag 1" in finding.why


def test_ranks_that_somebody_interrupted_are_no_finding() -> None:
    """Ctrl-C under a launcher of somebody else's: it reaches all of them, in any order."""
    zero, one = pair()
    error = RankException(type_name="KeyboardInterrupt", message="")
    assert not analyze(job([returned(zero), replace(alive(one.wait("barrier", 9)), error=error)])).findings
    assert not analyze(job([alive(zero), replace(alive(one), error=error)])).findings


def test_of_ranks_whose_end_nobody_saw_the_one_that_was_silent_first_is_named() -> None:
    """The other one was stopped because of it, by a launcher that says nothing to who looks from outside."""
    zero, one = pair()
    ended = ProcessState(pid=1, state="ended")
    views = [
        alive(rank, log=rank.log(heartbeat_ns=beat_ns), process=ended)
        for rank, beat_ns in ((zero, 104_200 * S // 1000), (one, 104 * S))
    ]
    (finding,) = analyze(job(views)).findings
    assert (finding.code, finding.ranks) == ("DDP209", (1,))


LATE: dict[str, Any] = {"is_watched": False}
"""Nobody looks whether it is over until the rank starts another one."""
PASSED_OVER: dict[str, Any] = {"state": "unknown", "pending_ns": 101 * S}
AT_ITEM = CodeLine(FILE, 20, "main", "print(loss.item())")
COMPUTES = CodeLine(FILE, 30, "main", "plot(history)")


def late_pair() -> tuple[Writer, Writer]:
    """Two ranks that have done one all_reduce together."""
    ranks = (Writer(0, WORLD), Writer(1, WORLD))
    for rank in ranks:
        rank.call("all_reduce", 1, **LATE)
    return ranks


def analyze_late(*ranks: RankSnapshot, after_s: float = 40.0) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """Codes and severities of what is found, and the status."""
    found: Analysis = analyze(job(ranks, after_s=after_s))
    return [(finding.code, finding.severity) for finding in found.findings], found.status


@pytest.mark.parametrize("more", [{}, {"ddp": bucket()}])
def test_one_of_too_many_to_follow_holds_its_rank_up_like_any_other(more: dict[str, Any]) -> None:
    """The other rank has come to its end; a collective of a graph, which nobody saw pending, proves nothing."""
    zero, one = late_pair()
    zero.call("all_reduce", 5, **LATE, **PASSED_OVER, **more)
    assert analyze_late(alive(zero), returned(one))[0] == [("DDP208", "error")]
    zero, one = late_pair()
    zero.call("all_reduce", 5, **LATE, state="unknown", **more)
    assert analyze_late(alive(zero), returned(one)) == ([], ())


def test_what_all_ranks_have_begun_is_not_called_stuck_where_there_were_too_many_to_follow() -> None:
    """Also over gloo, where somebody looks all the time, but not at these."""
    ranks = (Writer(0, WORLD), Writer(1, WORLD))
    for rank in ranks:
        rank.call("all_reduce", 5, **PASSED_OVER)
    assert analyze_late(*(alive(rank, AT_ITEM) for rank in ranks)) == ([], ())


@pytest.mark.parametrize("op", ["broadcast", "scatter"])
def test_a_root_that_computes_after_it_has_given_its_part_waits_for_nobody(op: str) -> None:
    """Its part may be over; it waits where it reads a number, or has begun what needs the others."""
    root = group_of(0, 1)
    for stack, begins_more, is_held in ((COMPUTES, False, False), (AT_ITEM, False, True), (COMPUTES, True, True)):
        zero, one = late_pair()
        zero.wait(op, 5, root=root.rank, **LATE)
        if begins_more:
            zero.wait("all_reduce", 6, **LATE)
        codes, status = analyze_late(alive(zero, stack), alive(one, COMPUTES))
        assert (codes == [("DDP218", "warning")]) is is_held
        assert bool(status) is is_held


@pytest.mark.parametrize("more", [LATE, {}])
def test_a_root_whose_part_is_over_waits_in_what_it_has_begun_since(more: dict[str, Any]) -> None:
    """Its broadcast is done without rank 1, which has come to neither."""
    zero, one = late_pair()
    zero.call("broadcast", 5, root=0, **more)
    assert analyze_late(alive(zero, COMPUTES), alive(one, COMPUTES)) == ([], ())
    zero.wait("all_reduce", 6, **more)
    codes, (status,) = analyze_late(alive(zero, COMPUTES), alive(one, COMPUTES))
    assert codes == [("DDP218", "warning")]
    assert "all_reduce (#2 of the default group)" in status


def test_a_receive_that_returned_at_once_says_nothing_about_a_rank_that_computes() -> None:
    """Whether the sender has come or not; where the rank reads a number it waits for a message that is not sent."""
    for stack, is_held in ((COMPUTES, False), (AT_ITEM, True)):
        zero, one = late_pair()
        one.wait("recv", 5, peer=0, tag=0, via="recv", **LATE)
        codes, status = analyze_late(alive(zero, COMPUTES), alive(one, stack))
        assert (codes == [("DDP218", "warning")]) is is_held
        assert bool(status) is is_held


def test_a_first_message_between_two_ranks_waits_in_its_call() -> None:
    """To connect takes both of them; the call is made by recording's kernels, and the sender has come to its end."""
    zero, one = late_pair()
    one.wait("recv", 5, peer=0, tag=0, via="recv", **LATE)
    in_call = CodeLine("/x/site-packages/ddpilot/record/collectives/start_stop.py", 86, "kernel")
    assert analyze_late(returned(zero), alive(one, in_call, CodeLine(FILE, 5, "main", "dist.recv(x, 0)")))[0] == [
        ("DDP219", "error")
    ]


def test_a_message_of_several_that_run_as_one_is_the_other_side_of_a_receive() -> None:
    """`batch_isend_irecv` over NCCL gives no work for each, so that nobody sees its end."""
    zero, one = late_pair()
    zero.call("send", 4, peer=1, tag=0, state="unknown", **LATE)
    one.wait("recv", 5, peer=0, tag=0, via="recv", **LATE)
    assert analyze_late(alive(zero, COMPUTES), alive(one, AT_ITEM)) == ([], ())


def test_the_other_side_of_a_receive_is_known_where_messages_cannot_be_counted() -> None:
    """The rings hold the newest calls alone: a send of several that run as one counts as come, and none as missing."""
    for sends, found in ((True, []), (False, [("DDP218", "warning")])):
        zero, one = late_pair()
        if sends:
            zero.call("send", 4, peer=1, tag=0, state="unknown", **LATE)
        one.wait("recv", 5, peer=0, tag=0, via="recv", **LATE)
        logs = [replace(rank.log(), collectives=rank.log().collectives[1:]) for rank in (zero, one)]
        codes, _ = analyze_late(alive(zero, COMPUTES, log=logs[0]), alive(one, AT_ITEM, log=logs[1]))
        assert codes == found


def test_messages_over_nccl_have_no_tags() -> None:
    """It goes by their order alone, so that two with different tags are the two sides of one; gloo goes by tags."""
    for more, found in ((LATE, []), ({}, [("DDP219", "error")])):
        zero, one = late_pair()
        zero.wait("send", 4, peer=1, tag=1, via="send", **more)
        one.wait("recv", 5, peer=0, tag=2, via="recv", **more)
        assert analyze_late(alive(zero, AT_ITEM), alive(one, AT_ITEM)) == (found, ())


def test_a_pipeline_whose_batch_of_messages_lacks_its_other_side_is_seen() -> None:
    """By counting, and where its rank waits; not in a rank that computes, and not for one that went on since."""
    for stack, goes_on, is_held in ((AT_ITEM, False, True), (COMPUTES, False, False), (AT_ITEM, True, False)):
        zero, one = late_pair()
        for _ in range(2):
            zero.call("send", 4, peer=1, tag=0, state="unknown", **LATE)
            zero.call("recv", 4, peer=1, tag=0, state="unknown", **LATE)
        one.call("recv", 5, peer=0, tag=0, state="unknown", **LATE)
        one.call("send", 5, peer=0, tag=0, state="unknown", **LATE)
        if goes_on:
            zero.call("all_reduce", 6, state="unknown", **LATE)
        codes, status = analyze_late(alive(zero, stack), alive(one, COMPUTES))
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
    zero, one = late_pair()
    zero.wait("all_reduce", 5, is_async=True, **LATE)
    inner = (frame,) if frame.file == FILE else (frame, CodeLine(FILE, 20, "main", "f(loss)"))
    assert bool(analyze_late(alive(zero, *inner), alive(one, COMPUTES))[1]) is waits
