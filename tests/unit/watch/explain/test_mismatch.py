# SPDX-License-Identifier: Apache-2.0
"""Ranks in different collectives: proven at once, with the branch, the loop or the handler that parted them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpilot.findings.finding import Finding
from ddpilot.record.flight_ring.log import CallSite, Tensor
from ddpilot.record.journal import Entry
from ddpilot.user_files import CodeLine
from ddpilot.watch.analysis import analyze
from ddpilot.watch.snapshot.model import JobSnapshot, ProcessState, RankException, RankSnapshot
from tests.unit.watch.logs import FILE, Writer, alive, bucket, died, group_of, job, part, returned, texts_of

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
        "  why: the barrier at train.py:4 is inside `if rank == 1:` (train.py:3); ranks 0,2,3 continued to train.py:5\n"
        "  fix: call the same collectives in the same order on all ranks: move what differs out of the branch\n"
        "  see: ddpilot explain DDP201"
    )
    assert analysis.is_stalled
    assert analysis.findings[0].ranks == (1,)


@pytest.mark.parametrize(
    ("odd", "code", "said"),
    [
        ({"inputs": (Tensor(dtype="float32", shape=(5,), device="cpu"),)}, "DDP202", "4 and 5 elements"),
        ({"inputs": (Tensor(dtype="float32", shape=(), device="cpu"),)}, "DDP202", "4 and 1 element"),
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
    assert finding.summary.endswith(said)


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
        ("all_reduce", {"inputs": (tensor(2, 6),)}, {"inputs": (tensor(4, 3),)}),
        ("all_reduce", {"inputs": (tensor(2, 3),)}, {"inputs": (tensor(1, 2, 3),)}),
        (
            "all_gather",
            {"inputs": (tensor(2),), "outputs": (tensor(2), tensor(3))},
            {"inputs": (tensor(3),), "outputs": (tensor(2), tensor(3))},
        ),
        ("all_to_all_single", {"inputs": (tensor(2),)}, {"inputs": (tensor(3),)}),
        ("all_reduce", {}, {"reduce_op": None}),
    ],
    ids=["same number of elements", "views", "a dimension of one", "all_gather", "all_to_all", "not read yet"],
)
def test_what_may_differ_is_not_a_mismatch(op: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    """Shapes of one size, sizes that each rank chooses, and a reduce-op that is not known yet."""
    zero, one = writers("x = 1\n")
    assert not analyze(job([alive(zero.call(op, 1, **first)), alive(one.call(op, 1, **second))])).findings


def test_an_all_gather_into_equal_rooms_of_other_sizes_is_a_size_mismatch() -> None:
    """Each rank has room for as much as it gives itself, and the others give another number of rows."""
    ranks = writers("x = 1\n", 3)
    for rank in ranks:
        given = tensor(7 if rank.rank == 2 else 10)
        rank.wait("all_gather", 1, inputs=(given,), outputs=(given,) * 3)
    finding = find("x = 1\n", *ranks)
    assert (finding.code, finding.ranks) == ("DDP202", (2,))
    assert "10 and 7 elements" in finding.summary


def exchange(sent: int, expected: int) -> list[Writer]:
    """Rank 0 gives `sent` rows of two to rank 1, which expects `expected` and comes no further."""
    zero, one = writers("dist.all_to_all_single(y, x)\ndist.barrier()\n")
    about_zero = {"inputs": (tensor(3 + sent, 2),), "outputs": (tensor(7, 2),), "splits": ((3, 4), (3, sent))}
    about_one = {"inputs": (tensor(8, 2),), "outputs": (tensor(expected + 4, 2),), "splits": ((expected, 4), (4, 4))}
    return [zero.call("all_to_all_single", 1, **about_zero), one.wait("all_to_all_single", 1, **about_one)]


def test_parts_of_an_exchange_that_differ_are_named_by_the_pair() -> None:
    """gloo aborts the one that expects less, and the other is in its next collective."""
    zero, one = exchange(5, 4)
    finding = find("dist.all_to_all_single(y, x)\ndist.barrier()\n", zero.wait("barrier", 2), one)
    assert finding.code == "DDP202"
    assert finding.summary.endswith("in size: 10 elements for rank 1 and 8 elements from rank 0")
    assert "split sizes" in finding.fix


def test_an_uneven_exchange_that_fits_is_right() -> None:
    """Each pair has a number of its own."""
    assert not analyze(job([alive(rank) for rank in exchange(5, 5)], after_s=0.1)).findings


def test_a_turned_tensor_is_an_error_although_nothing_stalls() -> None:
    """As many numbers, and every one of them is added to one that it does not belong to."""
    zero, one = writers("x = 1\n")
    zero.call("all_reduce", 1, inputs=(tensor(4, 6),)).call("all_reduce", 1)
    one.call("all_reduce", 1, inputs=(tensor(6, 4),)).call("all_reduce", 1)
    analysis = analyze(job([alive(zero), alive(one)]))
    (finding,) = analysis.findings
    assert (finding.code, finding.severity, analysis.is_stalled) == ("DDP202", "error", False)
    assert "in shape: [4, 6] and [6, 4]" in finding.summary


def test_a_desync_is_told_after_wrong_numbers_that_went_on() -> None:
    """A reduce-op that differs keeps nobody from what comes later."""
    zero, one = writers("x = 1\n")
    zero.call("all_reduce", 1).wait("barrier", 2)
    one.call("all_reduce", 1, reduce_op="MAX").wait("broadcast", 3)
    analysis = analyze(job([alive(zero), alive(one)]))
    assert sorted(finding.code for finding in analysis.findings) == ["DDP201", "DDP204"]
    assert analysis.is_stalled


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
    """Also from the recorded lines alone: the loop is in a function."""
    led = [(4, "<module>")]
    zero, one = writers(UNEVEN)
    for rank in (zero, one):
        rank.call("all_reduce", 3, ddp=bucket(), function="train", led=led)
    finding = find(UNEVEN, zero.wait("barrier", 5), one.wait("all_reduce", 3, ddp=bucket(), function="train", led=led))
    assert (finding.code, finding.ranks) == ("DDP207", (0,))
    assert "`for x in batches:` (train.py:2) ran fewer iterations on rank 0" in finding.why


HELPERS = "def reduce_mean(value):\n    dist.all_reduce(value)\n"
LOOP = """\
def train(batches):
    for x in batches:
        model(x).backward()
def main():
    for epoch in range(3):
        train(loader)
"""


def with_helper(call: str) -> Finding:
    """Rank 0 is in a helper of another file, by its recorded lines; rank 1 is in the loop, with its stack."""
    source = f"{LOOP}{call}main()\n"
    zero, one = writers(source)
    for rank in (zero, one):
        rank.call("all_reduce", 3, ddp=bucket(), function="train", led=[(6, "main")])
    at = next(number for number, text in texts_of(source).items() if "reduce_mean" in text)
    callers = (CodeLine(FILE, at, "other" if "other" in call else "main", texts_of(source)[at]),)
    helper = CallSite(file="helpers.py", line=2, text="dist.all_reduce(value)", function="reduce_mean", callers=callers)
    zero.wait("all_reduce", 2, at=helper, inputs=(tensor(1),))
    one.wait("all_reduce", 3, ddp=bucket(), function="train", led=[(6, "main")])
    outer = (CodeLine(FILE, 3, "train", "model(x).backward()"), CodeLine(FILE, 6, "main", "train(loader)"))
    sources = {FILE: source, "helpers.py": HELPERS}
    (finding,) = analyze(job([alive(zero), alive(one, *outer)], sources=sources)).findings
    return finding


@pytest.mark.parametrize(
    "call",
    [
        "        reduce_mean(loss)\n",
        "        utils.reduce_mean(loss)\n        utils.reduce_mean(accuracy)\n",
    ],
)
def test_a_loop_that_has_ended_is_named_where_the_other_rank_is_in_a_helper_of_another_file(call: str) -> None:
    """What calls the helper is a function that the rank in the loop is in."""
    finding = with_helper(call)
    assert (finding.code, finding.ranks) == ("DDP207", (0,))
    assert "`for x in batches:` (train.py:2) ran fewer iterations on rank 0" in finding.why


@pytest.mark.parametrize(
    "call",
    [
        "        if rank == 0:\n            reduce_mean(loss)\n",
        "        if loss > best:\n            reduce_mean(loss)\n        if x:\n            reduce_mean(loss)\n",
        "def other():\n    reduce_mean(loss)\n",
    ],
)
def test_a_helper_behind_a_branch_or_called_from_elsewhere_is_no_uneven_data(call: str) -> None:
    """A condition on the rank is the reason; where the call is not known, nothing is said of the loop."""
    assert with_helper(call).code == "DDP201"


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


def test_a_skipped_collective_that_met_the_order_of_buckets_is_no_forward_of_one_rank() -> None:
    """DDP broadcasts the order in the second forward, whose line has called no collective before."""
    source = """\
for x in loader:
    loss = model(x)
    loss.backward()
    if rank != 1:
        dist.all_reduce(loss)
"""
    zero, one = writers(source)
    zero.call("all_reduce", 3, ddp=bucket()).wait("all_reduce", 5)
    one.call("all_reduce", 3, ddp=bucket()).wait("broadcast", 2, ddp=part("bucket order"))
    finding = find(source, zero, one)
    assert finding.code == "DDP201"
    assert "train.py:5 is inside `if rank != 1:` (train.py:4)" in finding.why
    source = source.replace("dist.all_reduce(loss)", "model(x)")
    zero, one = writers(source)
    zero.call("all_reduce", 3, ddp=bucket()).wait("broadcast", 5, ddp=part("bucket order"))
    one.call("all_reduce", 3, ddp=bucket()).wait("all_reduce", 3, ddp=bucket())
    assert find(source, zero, one).code == "DDP211"


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


@pytest.mark.parametrize(
    ("line", "behind"),
    [
        ("first and dist.barrier()", "inside"),
        ("first or dist.barrier()", "only reached if this is false:"),
        ("dist.barrier() if first else None", "inside"),
        ("None if first else dist.barrier()", "only reached if this is false:"),
    ],
)
def test_a_guard_within_the_line_itself_is_named(line: str, behind: str) -> None:
    """Short-circuits and conditional expressions decide as an `if` does."""
    source = f"first = dist.get_rank() == 0\nfor x in loader:\n    {line}\n    y.backward()\n"
    zero, one = writers(source)
    finding = find(source, zero.wait("barrier", 3), one.wait("all_reduce", 4, ddp=bucket()))
    assert (finding.code, finding.ranks) == ("DDP201", (0,))
    assert f"is {behind} `{line}` (train.py:3)" in finding.why


def test_a_line_that_only_computes_with_the_rank_is_no_guard() -> None:
    """All ranks come there."""
    source = "x = scale(rank or 1); dist.barrier()\ny.backward()\n"
    zero, one = writers(source)
    finding = find(source, zero.wait("barrier", 1), one.wait("all_reduce", 2, ddp=bucket()))
    assert "is inside" not in finding.why


MATCH = """\
for x in loader:
    y.backward()
    if step == 4:
        match rank:
            case 0:
                dist.barrier()
            case _:
                pass
"""


def test_the_case_of_a_match_on_the_rank_is_named() -> None:
    """And not the condition around it, which is the same on all ranks."""
    zero, one = writers(MATCH)
    finding = find(MATCH, zero.wait("barrier", 6), one.wait("all_reduce", 2, ddp=bucket()))
    assert (finding.code, finding.ranks) == ("DDP201", (0,))
    assert "is inside `match rank: case 0:` (train.py:4)" in finding.why


def test_a_while_that_each_rank_ends_for_itself_is_an_early_exit() -> None:
    """Its own condition is what is decided, not the number of batches."""
    source = "while loss > limit(rank):\n    y.backward()\ndist.barrier()\n"
    zero, one = writers(source)
    for rank in (zero, one):
        rank.call("all_reduce", 2, ddp=bucket())
    finding = find(source, zero.wait("barrier", 3), one.wait("all_reduce", 2, ddp=bucket()))
    assert (finding.code, finding.ranks) == ("DDP208", (0,))
    assert (
        "`while loss > limit(rank):` (train.py:1) ended earlier on rank 0 than on rank 1: its condition" in finding.why
    )


def left_range(body: str, line: int) -> Finding:
    """Rank 0 is behind a loop over a range of nine rounds, rank 1 is at `line` in it."""
    source = f"for i in range(9):\n{body}dist.barrier()\n"
    zero, one = writers(source)
    for rank in (zero, one):
        rank.call("all_reduce", line, ddp=bucket())
    end = source.count("\n")
    return find(source, zero.wait("barrier", end), one.wait("all_reduce", line, ddp=bucket()))


def test_a_range_that_is_the_same_on_all_ranks_is_no_uneven_data() -> None:
    """Nothing says why one rank is not in it; it may have run all rounds, and the others again."""
    finding = left_range("    y.backward()\n", 2)
    assert finding.code == "DDP201"
    assert "fewer iterations" not in finding.why


def test_a_range_that_a_rank_has_left_for_good_ended_early() -> None:
    """It has returned in the midst of what has as many rounds on all ranks."""
    source = "for i in range(9):\n    y.backward()\n"
    zero, one = (rank.call("all_reduce", 2, ddp=bucket()) for rank in writers(source))
    view = job([alive(zero.wait("all_reduce", 2, ddp=bucket())), returned(one)], sources={FILE: source})
    (finding,) = analyze(view).findings
    assert (finding.code, finding.ranks) == ("DDP208", (1,))
    assert "the same number of iterations on all ranks" in finding.why


CHIEF = """\
class Trainer:
    def __init__(self):
        self.first = dist.get_rank() == 0
    @property
    def leads(self):
        return self.first
    def fit(self):
        for epoch in range(3):
            for _ in range(4):
                y.backward()
            self.on_epoch_end()
    def on_epoch_end(self):
        if not self.leads:
            return
        dist.barrier()
Trainer().fit()
"""


def test_a_guard_is_seen_to_ask_for_the_rank_through_attributes_and_properties() -> None:
    """In methods, also where loops have as many rounds on all ranks."""
    fit = [(16, "<module>")]
    zero, one = (rank.call("all_reduce", 10, ddp=bucket(), function="fit", led=fit) for rank in writers(CHIEF))
    zero.wait("barrier", 15, function="on_epoch_end", led=[(11, "fit"), *fit])
    one.wait("all_reduce", 10, ddp=bucket(), function="fit", led=fit)
    finding = find(CHIEF, zero, one)
    assert (finding.code, finding.ranks) == ("DDP201", (0,))
    assert "is only reached if this is false: `if not self.leads:` (train.py:13)" in finding.why


def test_rounds_without_exchange_are_named_where_they_are_not_the_same_on_all_ranks() -> None:
    """As many rounds, and fewer of them with a collective."""
    body = "    last = (i + 1) % every(rank) == 0\n    with nullcontext() if last else ddp.no_sync():\n"
    finding = left_range(f"{body}        y.backward()\n", 4)
    assert (finding.code, finding.ranks) == ("DDP201", (0,))
    assert "whether `with nullcontext() if last else ddp.no_sync():` (train.py:3) applies" in finding.why


def test_an_exit_at_once_in_a_loop_is_named() -> None:
    """With its condition."""
    source = "for i in range(9):\n    if rank == 1 and i == 4:\n        os._exit(0)\n    y.backward()\n"
    zero, one = (rank.call("all_reduce", 4, ddp=bucket()) for rank in writers(source))
    zero.wait("all_reduce", 4, ddp=bucket())
    process = ProcessState(pid=4001, state="ended", exitcode=0)
    cut = RankSnapshot(rank=1, log=one.log(), process=process, returned=True)
    (finding,) = analyze(job([alive(zero), cut], sources={FILE: source})).findings
    assert (finding.code, finding.ranks) == ("DDP208", (1,))
    assert "`if rank == 1 and i == 4: os._exit(0)` (train.py:3) is decided per rank" in finding.why
    assert "has exited without cleanup, as with os._exit(0)" in finding.summary


def test_a_collective_of_another_thread_is_said_to_be_one() -> None:
    """In which order threads come is not the same on all ranks."""
    source = "def log():\n    dist.all_reduce(x)\nfor x in loader:\n    y.backward()\n"
    zero, one = (rank.call("all_reduce", 4, ddp=bucket(), thread=4000 + rank.rank) for rank in writers(source))
    zero.wait("all_reduce", 2, function="log", thread=7)
    one.wait("all_reduce", 4, ddp=bucket(), thread=4001, inputs=(tensor(9),))
    finding = find(source, zero, one)
    assert "rank 0 calls the one at train.py:2 from a second thread, unlike rank 1" in finding.why
    assert "run the thread on all ranks and give it its own group" in finding.fix


DECORATED = """\
def only_on_main(function):
    @functools.wraps(function)
    def inner(*args):
        if dist.get_rank() == 0:
            return function(*args)
    return inner
@only_on_main
def evaluate(model):
    dist.all_reduce(total)
evaluate(model)
y.backward()
"""


def test_a_guard_in_a_decorator_is_named_from_the_recorded_lines_alone() -> None:
    """A rank that was aborted has left no stack."""
    zero, one = writers(DECORATED)
    one.wait("all_reduce", 11, ddp=bucket(), inputs=(tensor(9),))
    finding = find(
        DECORATED, zero.wait("all_reduce", 9, function="evaluate", led=[(5, "inner"), (10, "<module>")]), one
    )
    assert (finding.code, finding.ranks) == ("DDP201", (0,))
    assert "is inside `if dist.get_rank() == 0:` (train.py:4)" in finding.why


def test_ranks_that_returned_early_from_a_function_are_behind_a_guard_too() -> None:
    """`if rank != 0: return` decides about every line after it."""
    source = "def save():\n    if rank != 0:\n        return\n    dist.barrier()\nsave()\ny.backward()\n"
    zero, one = writers(source)
    finding = find(
        source, zero.wait("barrier", 4, function="save", led=[(5, "<module>")]), one.wait("all_reduce", 6, ddp=bucket())
    )
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
    zero.wait("barrier", 3, function="on_epoch_end", led=[(8, "<module>")])
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


OWN_AVERAGE = """\
def average(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
def train(batches):
    for b in batches:
        try:
            model(b).backward()
        except MemoryError:
            continue
        average(model)
train(batches)
dist.barrier()
"""


@pytest.mark.parametrize(("handler", "code"), [("MemoryError", "DDP210"), (None, "DDP207")])
def test_a_loop_over_parameters_is_not_what_ended_early(handler: str | None, code: str) -> None:
    """All ranks have as many of them: it is the loop around the call that had fewer rounds, and what skips one."""
    source = OWN_AVERAGE if handler else OWN_AVERAGE.replace("            continue", "            raise")
    zero, one = writers(source)
    for rank in (zero, one):
        rank.call("all_reduce", 3, function="average", led=[(10, "train"), (11, "<module>")])
    zero.wait("all_reduce", 3, function="average", led=[(10, "train"), (11, "<module>")])
    finding = find(source, zero, one.wait("barrier", 12))
    assert (finding.code, finding.ranks) == (code, (1,))
    assert "`for b in batches:` (train.py:5)" in finding.why
    assert ("`except MemoryError:` (train.py:8)" in finding.why) is (handler is not None)


@pytest.mark.parametrize(
    ("source", "behind", "told"),
    [
        (
            "try:\n    dist.all_reduce(t)\nexcept ValueError as e:\n    dist.all_gather(x, t)\n",
            4,
            "rank 1 entered `except ValueError as e:` (train.py:3) after an error that rank 0 did not have",
        ),
        ("try:\n    dist.all_reduce(t)\nfinally:\n    dist.all_gather(x, t)\n", 4, "rank 1 entered `finally:`"),
    ],
)
def test_a_collective_in_a_handler_is_told_by_the_error_that_led_there(source: str, behind: int, told: str) -> None:
    """The others are in what the handler or `finally` is the end of."""
    zero, one = writers(source)
    finding = find(source, zero.wait("all_reduce", 2), one.wait("all_gather", behind))
    assert (finding.code, finding.ranks) == ("DDP210", (1,))
    assert told in finding.why


WITH = """\
@contextmanager
def distributed():
    try:
        yield
    finally:
        dist.barrier()
with distributed():
    dist.all_reduce(t)
"""


def test_the_end_of_a_with_is_told_where_others_are_inside_it() -> None:
    """What its generator does behind the `yield` is reached by an error that nobody has seen yet."""
    zero, one = writers(WITH)
    zero.wait("all_reduce", 8)
    stack = (CodeLine(FILE, 6, "distributed", "dist.barrier()"), CodeLine(FILE, 7, "<module>", "with distributed():"))
    one.wait("barrier", 6, function="distributed")
    finding = analyze(job([alive(zero), alive(one, *stack)], sources={FILE: WITH})).findings[0]
    assert (finding.code, finding.ranks) == ("DDP210", (1,))
    assert "rank 1 entered the end of `with distributed():` (train.py:7)" in finding.why


CACHED = """\
def load():
    if "vocab" in CACHE:
        return CACHE["vocab"]
    dist.broadcast_object_list(obj, src=0)
    CACHE["vocab"] = obj[0]
load()
dist.barrier()
"""


def test_a_return_before_a_collective_is_told_where_nothing_else_says_it() -> None:
    """A cache that is filled on one rank only; what is written to is no setting, whatever its name."""
    zero, one = writers(CACHED)
    finding = find(CACHED, zero.wait("broadcast", 4, function="load", led=[(6, "<module>")]), one.wait("barrier", 7))
    assert (finding.code, finding.ranks) == ("DDP201", (1,))
    assert '`if "vocab" in CACHE: return CACHE["vocab"]` (train.py:2) may have returned before' in finding.why


JOINED = """\
with Join([model]):
    for batch in batches:
        loss = model(batch)
        loss.backward()
        dist.all_reduce(total)
dist.barrier()
"""


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_collective_of_ones_own_within_join_is_named(is_turned: bool) -> None:
    """It met one of Join's, sooner than anybody could see; the rank that has no more batches is the uneven one."""
    ranks = writers(JOINED)
    for rank in reversed(ranks) if is_turned else ranks:
        rank.call("all_reduce", 3, ddp=part("join"), via="DistributedDataParallel.forward")
        rank.call("all_reduce", 4, ddp=bucket()).call("all_reduce", 5, via="all_reduce")
    for what, line, shape in (("join", 3, (1,)), ("bucket", 4, (6,)), (None, 5, (1,)), ("join", 3, (1,))):
        ddp = bucket() if what == "bucket" else part("join") if what else None
        via = "all_reduce" if what is None else "DistributedDataParallel.forward"
        ranks[1].wait("all_reduce", line, ddp=ddp, via=via, inputs=(tensor(*shape),))
    for shape in ((1,), (6,), (1,), (6,)):
        ranks[0].wait("all_reduce", 1, ddp=part("join"), via="Join.__exit__", inputs=(tensor(*shape),))
    finding = find(JOINED, *ranks)
    assert (finding.code, finding.ranks) == ("DDP207", (1,))
    assert finding.place is not None
    assert finding.place.line == 5
    assert "the all_reduce of rank 1 at train.py:5 (#5) was matched with one of Join's" in finding.why
    assert "within Join" in finding.fix


def test_ranks_that_differ_within_join_while_all_have_batches_are_told_as_ever() -> None:
    """Join answers for nobody yet."""
    ranks = writers(JOINED)
    for rank, shape in zip(ranks, ((1,), (2,)), strict=True):
        rank.call("all_reduce", 3, ddp=part("join"), via="DistributedDataParallel.forward")
        rank.wait("all_reduce", 5, inputs=(tensor(*shape),), via="all_reduce")
    assert find(JOINED, *ranks).code == "DDP202"


@pytest.mark.parametrize(
    ("given", "is_told"),
    [
        ("set(metrics)", True),
        ('{"loss", "accuracy"}', True),
        ("enumerate(list(NAMES))", True),
        ("TABLE.items()", True),
        ("metrics.keys() & wanted.keys()", True),
        ("NAMES | more", True),
        ("sorted(NAMES)", False),
        ("metrics.items()", False),
        ("LIST", False),
    ],
)
def test_a_loop_over_a_set_is_named_where_ranks_are_at_different_entries(given: str, is_told: bool) -> None:
    """However it comes to the loop; what is sorted, and a dict as it was filled, has the same order everywhere."""
    source = (
        'NAMES = {"loss", "accuracy"}\nTABLE = {name: 0 for name in NAMES}\nLIST = [1, 2]\n'
        f"for key in {given}:\n    dist.all_reduce(metrics[key])\n"
    )
    ranks = writers(source)
    for rank, shape in zip(ranks, (3, 14), strict=True):
        rank.wait("all_reduce", 5, inputs=(tensor(shape),))
    finding = find(source, *ranks)
    assert finding.code == "DDP202"
    assert ("iterates over a set, whose order differs between processes" in finding.why) == is_told
    assert ("`sorted(...)`" in finding.fix) == is_told


CALLED_TWICE = """\
def mean(value):
    dist.all_reduce(value)
for epoch in range(3):
    for x in loader:
        model(x).backward()
    mean(loss)
    if rank == 0:
        mean(best)
"""


def called(line: int) -> CallSite:
    """The collective of the helper, called from `line` of the script."""
    text = texts_of(CALLED_TWICE)
    caller = CodeLine(FILE, line, "<module>", text[line])
    return CallSite(file=FILE, line=2, function="mean", text=text[2], callers=(caller,))


@pytest.mark.parametrize("is_dead", [False, True], ids=["waiting", "dead"])
def test_the_branch_around_the_call_of_a_helper_is_named_where_others_call_it_elsewhere(is_dead: bool) -> None:
    """By the calls that were recorded with the line: without a stack, and although it has several callers."""
    zero, one = writers(CALLED_TWICE)
    for rank in (zero, one):
        rank.call("all_reduce", 5, ddp=bucket())
        rank.call("all_reduce", 2, at=called(6), inputs=(tensor(1),))
    zero.wait("all_reduce", 2, at=called(8), inputs=(tensor(1),))
    one.wait("all_reduce", 5, ddp=bucket())
    ranks = [died(zero, "SIGABRT", -6) if is_dead else alive(zero), alive(one)]
    (finding,) = analyze(job(ranks, sources={FILE: CALLED_TWICE})).findings
    assert (finding.code, finding.ranks) == ("DDP201", (0,))
    assert "called at train.py:8, is inside `if rank == 0:` (train.py:7); rank 1 continued to train.py:5" in finding.why


def test_a_helper_that_ranks_called_from_different_lines_is_where_they_parted() -> None:
    """What rank 0 called once more has met the others' next call of it: the difference shows a round later."""
    zero, one = writers(CALLED_TWICE)
    for rank in (zero, one):
        rank.call("all_reduce", 5, ddp=bucket())
        rank.call("all_reduce", 2, at=called(6), inputs=(tensor(1),))
    zero.call("all_reduce", 2, at=called(8), inputs=(tensor(1),))
    one.call("all_reduce", 2, at=called(6), inputs=(tensor(1),))
    zero.wait("all_reduce", 5, ddp=bucket())
    one.wait("barrier", 6)
    finding = find(CALLED_TWICE, zero, one)
    assert (finding.code, finding.ranks) == ("DDP201", (0,))
    assert "called at train.py:8, is inside `if rank == 0:` (train.py:7)" in finding.why


def test_a_condition_on_what_is_given_to_a_call_is_no_branch() -> None:
    """All ranks that come there call it; what parts them is the return before."""
    source = """\
def share(value):
    dist.broadcast_object_list([value])
def resume(path):
    if not found(path):
        return 0
    state = share(load() if rank == 0 else None)
resume(path)
ddp = DDP(model)
"""
    zero, one = writers(source)
    zero.wait("broadcast", 2, function="share")
    one.wait("all_gather", 8, ddp=part("construction"))
    stack = (CodeLine(FILE, 2, "share", ""), CodeLine(FILE, 6, "resume", ""), CodeLine(FILE, 7, "<module>", ""))
    view = job([alive(zero, *stack), alive(one, CodeLine(FILE, 8, "<module>", ""))], sources={FILE: source})
    (finding,) = analyze(view).findings
    assert finding.code == "DDP201"
    assert "`if not found(path): return 0` (train.py:4) may have returned before" in finding.why


SWALLOWED = """\
def step(x):
    try:
        model(x).backward()
    except MemoryError:
        return None
for epoch in range(3):
    losses = [step(x) for x in loader]
    dist.all_reduce(mean(losses))
"""
IN_A_LOOP = SWALLOWED.replace("losses = [step(x) for x in loader]", "for x in loader: step(x)")


@pytest.mark.parametrize("source", [SWALLOWED, IN_A_LOOP])
def test_a_handler_in_what_the_loop_calls_is_named(source: str) -> None:
    """One rank has skipped a backward there, and is ahead of the other one."""
    zero, one = writers(source)
    for rank in (zero, one):
        rank.call("all_reduce", 3, ddp=bucket(), function="step")
    zero.wait("all_reduce", 3, ddp=bucket(), function="step")
    one.wait("all_reduce", 8, inputs=(tensor(1),))
    stack = (CodeLine(FILE, 3, "step", ""), CodeLine(FILE, 7, "<module>", ""))
    view = job([alive(zero, *stack), alive(one, CodeLine(FILE, 8, "<module>", ""))], sources={FILE: source})
    (finding,) = analyze(view).findings
    assert (finding.code, finding.ranks) == ("DDP210", (1,))
    assert "`except MemoryError:` (train.py:4)" in finding.why
    assert ("points of one loop" in finding.why) == (source is SWALLOWED)


def test_the_loop_over_data_is_named_where_the_one_around_it_has_as_many_rounds_on_all_ranks() -> None:
    """The rank that has had fewer batches in all is behind both loops, the other one in a function that they call."""
    source = """\
def train():
    for x in loader:
        model(x).backward()
for epoch in range(3):
    train()
dist.all_reduce(total)
"""
    zero, one = writers(source)
    for rank in (zero, one):
        rank.call("all_reduce", 3, ddp=bucket(), function="train")
    zero.wait("all_reduce", 3, ddp=bucket(), function="train")
    one.wait("all_reduce", 6, inputs=(tensor(1),))
    stack = (CodeLine(FILE, 3, "train", ""), CodeLine(FILE, 5, "<module>", ""))
    view = job([alive(zero, *stack), alive(one, CodeLine(FILE, 6, "<module>", ""))], sources={FILE: source})
    (finding,) = analyze(view).findings
    assert (finding.code, finding.ranks) == ("DDP207", (1,))
    assert "`for x in loader:` (train.py:2) ran fewer iterations on rank 1" in finding.why


def test_calls_from_different_lines_are_not_said_to_be_in_common() -> None:
    """They were only matched by their number, as with a collective that one rank alone called before."""
    first, second = ranks = writers(BRANCH)
    first.call("all_reduce", 2).wait("all_reduce", 5)
    second.call("all_reduce", 5).wait("barrier", 4)
    assert not [line for line in find(BRANCH, *ranks).evidence if "in common" in line]


COUNT = "DDP expects same model across all ranks, but Rank 0 has 3 params, while rank 1 has inconsistent 4 params."
SHAPE = "[1]: params[1] in this process with sizes [6, 8] appears not to match sizes of the same param in process 0."
USUAL = [["body.weight", [8, 4], "float32", True], ["head.weight", [5, 8], "float32", True]]


def wrapping(parameters: list[Any], *, at: int = 3) -> tuple[Entry, ...]:
    """A rank's note that it is about to wrap a model with these parameters."""
    site = {"file": FILE, "line": 7, "function": "main", "text": "model = DDP(net)"}
    values = {"group": "world", "at": at, "parameters": parameters, "num_parameters": len(parameters), "site": site}
    return (Entry(index=1, time_ns=0, kind="wrapping", values=values),)


def failed(*models: list[Any], message: str = COUNT, more: Any = None) -> JobSnapshot:
    """A job whose ranks wrap these models; torch tells rank 0."""
    group = group_of(*range(len(models)))
    error = RankException(type_name="RuntimeError", message=message)
    ranks = []
    for rank, model in enumerate(models):
        writer = Writer(rank, group).call("all_gather", 7, ddp=part("construction"))
        notes = wrapping(model, **(more or {}).get(rank, {}))
        ranks.append(alive(writer, journal=notes, error=error if rank == 0 else None))
    return job(ranks)


FROZEN = [[*USUAL[0][:3], False], USUAL[1]]
LONGER = [*USUAL, ["probe.weight", [1], "float32", True]]
WIDER = [USUAL[0], ["head.weight", [6, 8], "float32", True]]


@pytest.mark.parametrize(
    ("odd", "message", "code", "said"),
    [
        (LONGER, COUNT, "DDP301", "only rank 2 has `probe.weight`"),
        (FROZEN, COUNT, "DDP304", "`body.weight` is frozen on rank 2 but not on rank 0"),
        (WIDER, SHAPE, "DDP302", "`head.weight` is [5, 8] on rank 0 and [6, 8] on rank 2"),
    ],
)
def test_what_differs_and_on_whom_is_told_by_the_notes(odd: list[Any], message: str, code: str, said: str) -> None:
    """torch says it of the rank that notices, by number, and what is frozen as what is missing."""
    (finding,) = analyze(failed(USUAL, USUAL, odd, message=message)).findings
    assert (finding.code, finding.ranks, finding.why) == (code, (2,), said)
    assert str(finding.place) == f"{FILE}:7  model = DDP(net)"


@pytest.mark.parametrize(
    "view",
    [
        failed(USUAL, USUAL),
        failed(USUAL, LONGER, more={1: {"at": 4}}),
        failed(USUAL, LONGER, message="CUDA out of memory"),
    ],
    ids=["the same", "at another moment", "another error"],
)
def test_models_that_are_not_wrapped_together_are_not_compared(view: JobSnapshot) -> None:
    """Ranks may wrap other models in other groups, or try again."""
    assert not any(finding.code.startswith("DDP30") for finding in analyze(view).findings)


@pytest.mark.parametrize("name", ["head.weight", "norm.running_mean"])
def test_a_dtype_of_one_parameter_or_buffer_is_no_matter_of_sizes(name: str) -> None:
    """DDP sends what has one dtype together, so that the sizes of what is sent differ."""
    whole, half = ([USUAL[0], [name, [5, 8], dtype, False]] for dtype in ("float32", "bfloat16"))
    view = failed(whole, half, message="")
    group = group_of(0, 1)
    for rank, size in ((0, 72), (1, 32)):
        given = (Tensor(dtype="float32", shape=(size,), device="cpu"),)
        writer = Writer(rank, group).wait("broadcast", 7, ddp=part("construction"), inputs=given)
        seen = replace(view.ranks[rank], log=writer.log(), error=None)
        view = replace(view, ranks={**view.ranks, rank: seen})
    (finding,) = analyze(view).findings
    assert (finding.code, finding.why) == ("DDP303", f"`{name}` is float32 on rank 0 and bfloat16 on rank 1")
