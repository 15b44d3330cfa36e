# SPDX-License-Identifier: Apache-2.0
"""Ranks in different collectives: proven at once, with the branch, the loop or the handler that parted them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpilot.findings.finding import Finding
from ddpilot.record.log import Tensor
from ddpilot.watch.stall import analyze
from tests.unit.watch.logs import FILE, Writer, alive, bucket, group_of, job, part, texts_of

BRANCH = """\
for step in range(9):
    loss = model(x)
    if rank == 1:
        dist.barrier()
    loss.backward()
"""


def tensor(*shape: int) -> Tensor:
    """On the CPU."""
    return Tensor(dtype="float32", shape=shape, device="cpu")


def writers(source: str, num_ranks: int = 2) -> list[Writer]:
    """Ranks that run this program."""
    group = group_of(*range(num_ranks))
    return [Writer(rank, group, texts=texts_of(source)) for rank in range(num_ranks)]


def find(source: str, *ranks: Writer) -> Finding:
    """The one finding."""
    (finding,) = analyze(job([alive(rank) for rank in ranks], sources={FILE: source})).findings
    return finding


def test_desync_is_laid_out_by_ranks_with_what_was_in_common_and_the_branch() -> None:
    """The whole text, as a user sees it."""
    ranks = writers(BRANCH, 4)
    for rank in ranks:
        rank.call("broadcast", 2, ddp=part("buffers"))
        if rank.rank == 1:
            rank.wait("barrier", 4)
        else:
            rank.wait("all_reduce", 5, ddp=bucket(), num_bytes=25 << 20)
    analysis = analyze(job([alive(rank) for rank in ranks], sources={FILE: BRANCH}))
    assert str(analysis.findings) == (
        "desync  DDP201  collective #1 of the default group differs between ranks\n"
        "  ranks 0,2,3  all_reduce, DDP gradient bucket 0 (net.0.weight .. net.4.bias, 25.0 MB)   "
        "train.py:5  loss.backward()\n"
        "  rank 1       barrier                                                                   "
        "train.py:4  dist.barrier()\n"
        "  in common until #0: broadcast of DDP buffers, train.py:2\n"
        "  why: the barrier at train.py:4 is inside `if rank == 1:` (train.py:3); ranks 0,2,3 went on to train.py:5\n"
        "  fix: let all ranks call the same collectives in the same order: move what differs out of the branch\n"
        "  see: ddpilot explain DDP201"
    )
    assert analysis.is_stalled
    assert analysis.findings[0].ranks == (1,)


@pytest.mark.parametrize(
    ("odd", "code", "said"),
    [
        ({"inputs": (Tensor(dtype="float32", shape=(5,), device="cpu"),)}, "DDP202", "4 and 5 elements"),
        ({"inputs": (Tensor(dtype="float64", shape=(4,), device="cpu"),)}, "DDP203", "float32 and float64"),
        ({"reduce_op": "MAX"}, "DDP204", "SUM and MAX"),
    ],
)
def test_arguments_that_differ_have_their_own_codes(odd: dict[str, Any], code: str, said: str) -> None:
    """One rank gives something else to the same collective."""
    ranks = writers("x = 1\n", 3)
    for rank in ranks:
        rank.call("all_reduce", 1, **(odd if rank.rank == 2 else {}))
    finding = find("x = 1\n", *ranks)
    assert (finding.code, finding.severity, finding.ranks) == (code, "error", (2,))
    assert said in finding.summary


def test_roots_that_differ_are_named() -> None:
    """As ranks of the job."""
    ranks = writers("x = 1\n")
    for rank in ranks:
        rank.wait("broadcast", 1, root=rank.rank)
    finding = find("x = 1\n", *ranks)
    assert finding.code == "DDP205"
    assert "from rank 1" in "\n".join(finding.evidence)


@pytest.mark.parametrize(
    ("op", "first", "second"),
    [
        ("all_reduce", {"inputs": (tensor(2, 3),)}, {"inputs": (tensor(6),)}),
        ("all_gather", {"inputs": (tensor(2),)}, {"inputs": (tensor(3),)}),
        ("all_to_all_single", {"inputs": (tensor(2),)}, {"inputs": (tensor(3),)}),
        ("all_reduce", {}, {"reduce_op": None}),
    ],
    ids=["same number of elements", "all_gather", "all_to_all", "not read yet"],
)
def test_what_may_differ_is_no_clash(op: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    """Shapes of one size, sizes that each rank chooses, and a reduce-op that is not known yet."""
    zero, one = writers("x = 1\n")
    assert not analyze(job([alive(zero.call(op, 1, **first)), alive(one.call(op, 1, **second))])).findings


def test_what_a_ring_has_forgotten_is_not_compared() -> None:
    """Only what all of them still hold."""
    zero, one = writers("x = 1\n")
    for rank in (zero, one):
        for op in ("barrier", "all_reduce" if rank.rank else "barrier", "all_reduce"):
            rank.call(op, 1)
    entries = one.log().collectives[2:]
    assert not analyze(job([alive(zero), alive(one, log=one.log(collectives=entries))])).findings


def test_a_reduce_op_that_differs_is_an_error_although_nothing_stalls() -> None:
    """The numbers are wrong, and the job goes on."""
    ranks = writers("x = 1\n")
    for rank in ranks:
        rank.call("all_reduce", 1, reduce_op=("SUM", "AVG")[rank.rank]).call("barrier", 1)
    analysis = analyze(job([alive(rank) for rank in ranks]))
    assert [finding.code for finding in analysis.findings] == ["DDP204"]
    assert not analysis.is_stalled


UNEVEN = """\
def train(batches):
    for x in batches:
        model(x).backward()
train(loader)
dist.barrier()
"""


def test_a_loop_that_has_ended_on_one_rank_is_uneven_data() -> None:
    """Also from the lines alone: the loop is in a function, which is called from one place."""
    zero, one = writers(UNEVEN)
    for rank in (zero, one):
        rank.call("all_reduce", 3, ddp=bucket(), function="train")
    finding = find(UNEVEN, zero.wait("barrier", 5), one.wait("all_reduce", 3, ddp=bucket(), function="train"))
    assert (finding.code, finding.ranks) == ("DDP207", (0,))
    assert "`for x in batches:` (train.py:2) ended earlier on rank 0" in finding.why


def test_a_break_that_each_rank_decides_is_an_early_exit() -> None:
    """A limit that is the same for all ranks is not the reason."""
    source = """\
for step, x in enumerate(loader):
    if step >= args.max_steps:
        break
    model(x).backward()
    if loss.item() < 0.1:
        break
dist.barrier()
"""
    zero, one = writers(source)
    zero.call("all_reduce", 4, ddp=bucket()).wait("all_reduce", 4, ddp=bucket())
    one.call("all_reduce", 4, ddp=bucket()).wait("barrier", 7)
    finding = find(source, zero, one)
    assert (finding.code, finding.ranks) == ("DDP208", (1,))
    assert "`if loss.item() < 0.1: break` (train.py:6)" in finding.why


@pytest.mark.parametrize(
    ("head", "tail", "told"),
    [
        ("try:", "except RuntimeError:\n        continue", "`except RuntimeError:` (train.py:6)"),
        (
            "try:",
            "except RuntimeError as e:\n        if is_memory(e):\n            continue\n        raise",
            "`except RuntimeError as e:` (train.py:6)",
        ),
        ("with suppress(RuntimeError):", "", "`with suppress(RuntimeError):` (train.py:2)"),
    ],
)
def test_a_handler_that_goes_on_is_named_where_rounds_differ(head: str, tail: str, told: str) -> None:
    """One rank has begun the next round while the others are in backward."""
    source = f"for x in loader:\n    {head}\n        y = model(x)\n        check(y)\n        y.backward()\n    {tail}\n"
    zero, one = writers(source)
    for rank in (zero, one):
        rank.call("broadcast", 3, ddp=part("buffers"))
    zero.wait("all_reduce", 5, ddp=bucket())
    one.wait("broadcast", 3, ddp=part("buffers"))
    finding = find(source, zero, one)
    assert finding.code == "DDP210"
    assert told in finding.why


def test_a_handler_that_raises_again_is_not_blamed() -> None:
    """What it was is then not known."""
    source = (
        "for x in loader:\n    try:\n        y = model(x)\n        y.backward()\n"
        "    except RuntimeError:\n        log()\n        raise\n"
    )
    zero, one = writers(source)
    zero.call("broadcast", 3, ddp=part("buffers")).wait("all_reduce", 4, ddp=bucket())
    one.call("broadcast", 3, ddp=part("buffers")).wait("broadcast", 3, ddp=part("buffers"))
    assert find(source, zero, one).code == "DDP201"


def test_a_batch_that_one_rank_skips_is_named() -> None:
    """`continue` under a condition that is not the same on all ranks."""
    source = """\
for x in loader:
    loss = model(x)
    if not torch.isfinite(loss):
        continue
    loss.backward()
dist.barrier()
"""
    zero, one = writers(source)
    zero.call("all_reduce", 5, ddp=bucket()).wait("all_reduce", 5, ddp=bucket())
    one.call("all_reduce", 5, ddp=bucket()).wait("barrier", 6)
    finding = find(source, zero, one)
    assert (finding.code, finding.ranks) == ("DDP210", (1,))
    assert "`if not torch.isfinite(loss): continue` (train.py:4)" in finding.why


def test_a_forward_of_one_rank_is_told_from_where_the_lines_parted() -> None:
    """What clashes comes later: its extra broadcast met the others' next one."""
    source = """\
for x in loader:
    loss = model(x)
    loss.backward()
    if is_main:
        model(y)
"""
    zero, one = writers(source)
    for rank in (zero, one):
        for _ in range(40):
            rank.call("broadcast", 2, ddp=part("buffers")).call("all_reduce", 3, ddp=bucket())
    zero.call("broadcast", 5, ddp=part("buffers")).wait("broadcast", 2, ddp=part("buffers"))
    one.call("broadcast", 2, ddp=part("buffers")).wait("all_reduce", 3, ddp=bucket())
    finding = find(source, zero, one)
    assert (finding.code, finding.ranks) == ("DDP211", (0,))
    assert "train.py:5, inside `if is_main:` (train.py:4)" in finding.why
    assert finding.place is not None
    assert finding.place.line == 5


def test_a_bucket_that_one_rank_left_out_is_named_by_its_parameters() -> None:
    """It has begun the bucket before, in the same backward."""
    zero, one = writers("y.backward()\ndist.barrier()\n")
    zero.call("all_reduce", 1, ddp=bucket(0)).wait("all_reduce", 1, ddp=bucket(1))
    one.call("all_reduce", 1, ddp=bucket(0)).wait("barrier", 2)
    finding = find("y.backward()\ndist.barrier()\n", zero, one)
    assert (finding.code, finding.ranks) == ("DDP212", (1,))
    assert "net.0.weight, net.4.bias" in finding.why


@pytest.mark.parametrize(
    "guard",
    [
        "if dist.get_rank() == 0:",
        "if os.environ['LOCAL_RANK'] == '0':",
        "if accelerator.is_main_process:",
        "if first and verbose:",
        "if not me:",
    ],
)
def test_a_guard_is_seen_to_ask_for_the_rank_through_whatever_it_uses(guard: str) -> None:
    """Calls, variables of the environment, attributes, and names that were assigned from them."""
    head = "me = dist.get_rank()\nfirst = me == 0\n"
    source = f"{head}for x in loader:\n    {guard}\n        dist.barrier()\n    y.backward()\n"
    zero, one = writers(source)
    finding = find(source, zero.wait("barrier", 5), one.wait("all_reduce", 6, ddp=bucket()))
    assert (finding.code, finding.ranks) == ("DDP201", (0,))
    assert f"`{guard}` (train.py:4)" in finding.why


def test_ranks_that_returned_early_from_a_function_are_behind_a_guard_too() -> None:
    """`if rank != 0: return` decides about every line after it."""
    source = "def save():\n    if rank != 0:\n        return\n    dist.barrier()\nsave()\ny.backward()\n"
    zero, one = writers(source)
    finding = find(source, zero.wait("barrier", 4, function="save"), one.wait("all_reduce", 6, ddp=bucket()))
    assert finding.code == "DDP201"
    assert "`if rank != 0:` (train.py:2)" in finding.why


def test_gradients_of_two_models_in_another_order_are_different_collectives() -> None:
    """Their sizes differ because they are not the same; the branch that is taken is named, not the other one."""
    source = "if rank == 1:\n    g.backward()\nelse:\n    d.backward()\n"
    zero, one = writers(source)
    nine = (Tensor(dtype="float32", shape=(9,), device="cpu"),)
    zero.wait("all_reduce", 4, ddp=bucket(0))
    one.wait("all_reduce", 2, ddp=replace(bucket(), names=("g.weight",)), inputs=nine)
    finding = find(source, zero, one)
    assert (finding.code, finding.ranks) == ("DDP201", (1,))
    assert "train.py:2 is inside `if rank == 1:` (train.py:1)" in finding.why


def test_the_same_call_with_other_sizes_in_both_branches_is_a_size_mismatch() -> None:
    """They are meant to meet."""
    source = "if rank == 1:\n    dist.all_reduce(x)\nelse:\n    dist.all_reduce(y)\n"
    zero, one = writers(source)
    nine = (Tensor(dtype="float32", shape=(9,), device="cpu"),)
    assert find(source, zero.wait("all_reduce", 4), one.wait("all_reduce", 2, inputs=nine)).code == "DDP202"


def test_an_exit_in_a_loop_is_no_guard_of_what_follows() -> None:
    """One rank has ended its program there; the other has not been behind a condition."""
    source = "for x in loader:\n    if failed(x):\n        return\n    y.backward()\ndist.barrier()\n"
    zero, one = writers(source)
    zero.call("all_reduce", 4, ddp=bucket()).wait("all_reduce", 4, ddp=bucket())
    one.call("all_reduce", 4, ddp=bucket()).wait("barrier", 5)
    finding = find(source, zero, one)
    assert (finding.code, finding.ranks) == ("DDP208", (1,))
    assert "`if failed(x): return` (train.py:3)" in finding.why


def test_a_guard_in_what_is_called_goes_before_a_loop_that_may_have_ended() -> None:
    """A callback of rank 0; the other rank is in the next epoch already."""
    source = """\
def on_epoch_end(trainer):
    if trainer.is_global_zero:
        dist.barrier()
for epoch in range(3):
    for x in loader:
        y.backward()
    for callback in callbacks:
        on_epoch_end(callback)
"""
    zero, one = writers(source)
    for rank in (zero, one):
        rank.call("all_reduce", 6, ddp=bucket())
    zero.wait("barrier", 3, function="on_epoch_end")
    one.wait("all_reduce", 6, ddp=bucket())
    finding = find(source, zero, one)
    assert (finding.code, finding.ranks) == ("DDP201", (0,))
    assert "`if trainer.is_global_zero:` (train.py:2)" in finding.why


def test_both_branches_of_a_condition_with_one_collective_are_right() -> None:
    """A broadcast of rank 0 and its receivers may stand at two lines."""
    source = "if rank == 0:\n    dist.broadcast(x, 0)\nelse:\n    dist.broadcast(y, 0)\ndist.barrier()\n"
    zero, one = writers(source)
    zero.call("broadcast", 2, root=0).call("barrier", 5)
    one.call("broadcast", 4, root=0).call("barrier", 5)
    assert not analyze(job([alive(zero), alive(one)], sources={FILE: source})).findings


def test_a_file_that_was_changed_since_is_not_read() -> None:
    """Its lines would be blamed for what others did."""
    zero, one = writers(BRANCH)
    changed = "import x\n" + BRANCH
    ranks = [alive(zero.wait("all_reduce", 5, ddp=bucket())), alive(one.wait("barrier", 4))]
    (finding,) = analyze(job(ranks, sources={FILE: changed})).findings
    assert finding.code == "DDP201"
    assert "inside" not in finding.why


def test_what_is_older_than_the_cell_is_not_said() -> None:
    """A session's earlier cell has been stopped and said already."""
    zero, one = writers(BRANCH)
    ranks = [alive(zero.wait("all_reduce", 5)), alive(one.wait("barrier", 4))]
    assert analyze(job(ranks)).findings
    assert not analyze(job(ranks, since_ns=105 * 10**9)).findings


def test_a_group_that_was_made_anew_is_compared_alone() -> None:
    """What its predecessor of the same name ended with is over."""
    zero, one = writers("x = 1\n")
    again = group_of(0, 1, incarnation=2)
    for rank, op in ((zero, "barrier"), (one, "all_reduce")):
        rank.wait(op, 1).call("barrier", 1, group=again)
    assert not analyze(job([alive(zero), alive(one)])).findings
