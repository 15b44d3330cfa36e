# SPDX-License-Identifier: Apache-2.0
"""How a program's flow can part, read from its text."""

from __future__ import annotations

import pytest

from ddpilot.findings.finding import Finding
from ddpilot.source.control_flow import may_start_over
from ddpilot.source.parsed_file import Source
from ddpilot.watch.analysis import analyze
from tests.unit.watch.logs import FILE, Writer, alive, bucket, group_of, job, returned, texts_of

BEGUN_ANEW = {
    "a generator without end": "def forever(d):\n    while True:\n        yield from d  # HERE\n",
    "one that hands on each": "def f(d):\n    while True:\n        for b in d:  # HERE\n            yield b\n",
    "as many steps": "while step < n:\n    for b in d:  # HERE\n        if step == n:\n            break\n",
    "rounds without end": "for e in itertools.count():\n    for b in d:  # HERE\n        if x:\n            return\n",
    "held by hand": "it = iter(d)  # HERE\nfor i in range(9):\n    next(it)\n",
    "a circle": "for i, b in zip(range(9), cycle(d)):  # HERE\n    pass\n",
}
TO_ITS_END = {
    "epochs": "for e in range(2):\n    for b in d:  # HERE\n        step(b)\n",
    "epochs, by a condition": "while e < 2:\n    for b in d:  # HERE\n        step(b)\n    e += 1\n",
    "left outside": "while True:\n    for b in d:  # HERE\n        step(b)\n    if done:\n        break\n",
    "a generator with an end": "def f(d):\n    for b in d:  # HERE\n        yield b\n",
    "left from a loop inside": "while e < 2:\n    for b in d:  # HERE\n        for x in b:\n            break\n",
    "an iterator in the head": "for b in tqdm(iter(d)):  # HERE\n    step(b)\n",
}


def ask(text: str) -> bool:
    """Of the line that is marked."""
    line = next(at for at, one in enumerate(text.splitlines(), 1) if "HERE" in one)
    return may_start_over(Source(text), line)


@pytest.mark.parametrize("text", BEGUN_ANEW.values(), ids=BEGUN_ANEW)
def test_may_start_over_where_the_loop_takes_steps(text: str) -> None:
    """The end of what it goes over is not its own."""
    assert ask(text)


@pytest.mark.parametrize("text", TO_ITS_END.values(), ids=TO_ITS_END)
def test_may_start_over_is_false_where_the_loop_ends_with_what_it_goes_over(text: str) -> None:
    """Also where it is one of several epochs."""
    assert not ask(text)


EARLY = {
    "by a setting": (
        "while True:\n    n += 1\n    if n >= args.limit:\n        sys.exit(0)\n    go()  # HERE\n",
        "`if n >= args.limit: sys.exit(0)` (train.py:4)",
    ),
    "by an attribute": (
        "while True:\n    if self.done:\n        break\n    go()  # HERE\n",
        "`if self.done: break` (train.py:3)",
    ),
    "raised": (
        "for n in itertools.count():\n    if bad(n):\n        raise SystemExit(0)\n    go()  # HERE\n",
        "`if bad(n): raise SystemExit(0)` (train.py:3)",
    ),
    "of both loops": (
        "while True:\n    for x in loader:\n        if n > args.n:\n            sys.exit()\n        go()  # HERE\n",
        "`if n > args.n: sys.exit()` (train.py:4)",
    ),
    "not of the inner loop alone": (
        (
            "while True:\n    for x in loader:\n        if bad(x):\n            break\n        go()  # HERE\n"
            "    if late():\n        break\n"
        ),
        "`if late(): break` (train.py:7)",
    ),
    "not by a handler that goes on": (
        (
            "while True:\n    try:\n        go()  # HERE\n    except OSError:\n        continue\n"
            "    if late():\n        break\n"
        ),
        "`if late(): break` (train.py:7)",
    ),
    "of a generator without end": (
        "def forever(d):\n    while True:\n        yield from d\nfor x in forever(loader):\n    go()  # HERE\n",
        "`for x in forever(loader):` (train.py:4), which does not end by itself",
    ),
    "that nothing shows": (
        "for x in tqdm(cycle(loader)):\n    step(x)\n    go()  # HERE\n",
        "`for x in tqdm(cycle(loader)):` (train.py:1), which does not end by itself",
    ),
}
EARLY |= {
    f"of data, on {name}": (
        f"for n, x in enumerate(loader):\n    if {name} == 1 and n == 3:\n        break\n    go()  # HERE\n",
        f"`if {name} == 1 and n == 3: break` (train.py:3)",
    )
    for name in ("rank", "RANK", "args.rank", "args.local_rank", "self.rank")
}
OF_DATA = {
    "an iterator by hand": (
        "while True:\n    try:\n        x = next(it)\n    except StopIteration:\n        break\n    go()  # HERE\n",
        "its data ends at `except StopIteration:` (train.py:4)",
    ),
    "all in one try": (
        "while True:\n    try:\n        x = next(it)\n        go()  # HERE\n    except StopIteration:\n        break\n",
        "its data ends at `except StopIteration:` (train.py:5)",
    ),
    "a last value": (
        "while True:\n    x = next(it, None)\n    if x is None:\n        break\n    go()  # HERE\n",
        "its data ends at `if x is None: break` (train.py:4)",
    ),
    "a condition": ("while (x := next(it, None)) is not None:\n    go()  # HERE\n", "because of fewer batches"),
    "a check that fails": (
        (
            "def check():\n    if rank == 1:\n        sys.exit('no data')\nfor x in loader:\n    check()\n"
            "    go()  # HERE\n"
        ),
        "because of fewer batches",
    ),
}


def find(source: str) -> Finding:
    """What is said where rank 1 has ended after a round, and rank 0 is in the marked line, without known callers."""
    function = "train" if source.startswith("def train") else "<module>"
    line = next(at for at, one in enumerate(source.splitlines(), 1) if "HERE" in one)
    zero, one = (Writer(rank, group_of(0, 1), texts=texts_of(source)) for rank in (0, 1))
    for rank in (zero, one):
        rank.call("all_reduce", line, ddp=bucket(), function=function)
    view = job(
        [alive(zero.wait("all_reduce", line, ddp=bucket(), function=function)), returned(one)], sources={FILE: source}
    )
    (finding,) = analyze(view).findings
    return finding


@pytest.mark.parametrize(("source", "told"), EARLY.values(), ids=EARLY)
def test_an_endless_loop_that_one_rank_has_left_is_an_early_exit(source: str, told: str) -> None:
    """It has no data that could have ended; the line where it may be left is named."""
    finding = find(source)
    assert (finding.code, finding.ranks) == ("DDP208", (1,))
    assert told in finding.why


@pytest.mark.parametrize(("source", "told"), OF_DATA.values(), ids=OF_DATA)
def test_a_loop_that_ends_with_its_data_is_uneven_data(source: str, told: str) -> None:
    """However it is written."""
    finding = find(source)
    assert (finding.code, finding.ranks) == ("DDP207", (1,))
    assert told in finding.why


def test_an_error_that_is_swallowed_around_an_endless_loop_is_named() -> None:
    """Nothing in the loop leaves it."""
    finding = find("try:\n    while True:\n        step()\n        go()  # HERE\nexcept OSError:\n    log()\n")
    assert (finding.code, finding.ranks) == ("DDP210", (1,))
    assert "`except OSError:` (train.py:5) continued after an error" in finding.why


@pytest.mark.parametrize("name", ["RANK", "args.rank"])
def test_a_continue_on_the_rank_skips_rounds_whatever_the_rank_is_called(name: str) -> None:
    """Upper case, or an attribute of the settings, is no setting there."""
    finding = find(f"for x in loader:\n    if {name} == 1:\n        continue\n    go()  # HERE\n")
    assert (finding.code, finding.ranks) == ("DDP210", (1,))
    assert f"`if {name} == 1: continue` (train.py:3)" in finding.why


@pytest.mark.parametrize(
    "test", ["lora_rank > 0", "args.rank_loss_weight", "matrix_rank(x) > 2", "is_first_epoch", "rank > 0"]
)
def test_a_condition_that_does_not_ask_for_the_process_is_not_blamed_for_uneven_data(test: str) -> None:
    """Other names with a rank in them, and a `rank` of something else: the rank that has ended has passed it before."""
    finding = find(f"for x in loader:\n    if {test}:\n        go()  # HERE\n")
    assert (finding.code, finding.ranks) == ("DDP207", (1,))


def test_a_caller_that_was_not_recorded_is_not_guessed() -> None:
    """The function was started by ddpilot; the only call in its file is in a helper that nobody has called."""
    source = (
        "def train(loader):\n    for x in loader:\n        go()  # HERE\n"
        "def debug():\n    if rank == 0:\n        train([])\n"
    )
    finding = find(source)
    assert (finding.code, finding.ranks) == ("DDP207", (1,))
    assert "`for x in loader:` (train.py:2)" in finding.why
