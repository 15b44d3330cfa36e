# SPDX-License-Identifier: Apache-2.0
"""The arguments of a session's methods are checked before anything runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from ddpilot.errors import LaunchError
from ddpilot.session import arguments
from ddpilot.session.session import Session


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (lambda: arguments.check_code(3), "running a cell: 3 of type int. Give its code as text; `run` calls a func"),
        (lambda: arguments.check_ranks(0, 2, "x"), "x: `ranks=0`. Give numbers of ranks, such as [0]"),
        (lambda: arguments.check_ranks("0", 2, "x"), "x: `ranks='0'`. Give numbers of ranks"),
        (lambda: arguments.check_ranks(None, 2, "x"), "x: `ranks=None`. Give numbers of ranks"),
        (lambda: arguments.check_ranks([], 2, "x"), "x: no ranks. Give numbers of ranks"),
        (lambda: arguments.check_ranks([0, 2], 2, "x"), "x: rank 2, and the ranks are 0 to 1. Give numbers of ranks"),
        (lambda: arguments.check_ranks([True], 2, "x"), "x: rank True, and the ranks are 0 to 1"),
        (lambda: arguments.check_ranks([[0]], 2, "x"), "x: rank [0], and the ranks are 0 to 1. Give numbers of ranks"),
        (lambda: arguments.check_values([1]), 'pushing: [1] of type list. Give {"name": value}'),
        (lambda: arguments.check_values({1: 2}), "pushing: 1 is not a variable name. Give"),
        (lambda: arguments.check_values({"class": 2}), "pushing: 'class' is not a variable name. Give"),
        (lambda: arguments.check_expression(3), "pulling: 3 of type int. Give the name of a variable or an expression"),
        (lambda: arguments.check_expression("a b"), "pulling `a b`: that is not a Python expression: invalid syntax"),
        (lambda: arguments.check_values({"x": 1, "group": 2}), "pushing: `group` is set by the session on every rank"),
        (
            lambda: arguments.check_gpus((0,), 0),
            "reading `gpus`: number 0, and no GPU is visible here. Check `nvidia-smi`",
        ),
        (lambda: arguments.check_gpus((0, 1), 1), "number 1, and one GPU is visible here, number 0. Check"),
        (lambda: arguments.check_gpus((5,), 4), "number 5, and 4 GPUs are visible here, 0 to 3. Check"),
        (lambda: Session(ranks=2), "making a Session: it has no option `ranks`. Did you mean `nproc_per_node`"),  # type: ignore[call-arg]
        (lambda: Session(2, sed=1), "making a Session: it has no option `sed`. Did you mean `seed`"),  # type: ignore[call-arg]
        (lambda: Session(2, zzz=1), "it has no option `zzz`. Its options are nproc_per_node, gpus"),  # type: ignore[call-arg]
        (lambda: Session(2, hosts=[]), "reading `hosts`: no host. Name at least one, or leave `hosts` out"),
        (lambda: Session(2, gpus=0), "reading `gpus`: 0. Give numbers of GPUs"),  # type: ignore[arg-type]
    ],
)
def test_arguments_answer_wrong_use_with_the_right_one(check: Callable[[], object], answer: str) -> None:
    """What was done, what was found, what to do."""
    with pytest.raises(LaunchError, match=re.escape(answer)):
        check()


def test_arguments_that_are_right_come_through() -> None:
    """Ranks sorted, each once; an expression without the blanks around it."""
    assert arguments.check_ranks({3, 1}, 4, "x") == (1, 3)
    assert arguments.check_ranks(iter([1, 1]), 4, "x") == (1,)
    assert arguments.check_expression(" losses[0] ") == "losses[0]"
    assert arguments.check_values({"a": 1}) == {"a": 1}
    arguments.check_gpus((), 0)
    arguments.check_gpus((0, 3), 4)


def test_a_session_without_the_notebook_extra_names_what_to_install() -> None:
    """In a process in which pyzmq cannot be imported."""
    code = "import sys; sys.modules['zmq'] = None; from ddpilot.session.session import Session; Session(1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "zmq, jupyter_client, ipykernel cannot be imported. Install them: pip install" in done.stderr
    assert "ddpilot[notebook]" in done.stderr
