# SPDX-License-Identifier: Apache-2.0
"""The line ahead of a report."""

from __future__ import annotations

from ddpilot.errors import RankError, RendezvousError
from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.launching.elastic.agent import EarlyNotice, foretell
from ddpilot.user_files import CodeLine

TRACEBACK = """Traceback (most recent call last):
  File "/project/train.py", line 40, in <module>
    loss.backward()
RuntimeError: sizes differ
in two lines
"""


def make_error() -> RankError:
    """Of rank 1, with a message of two lines."""
    found = "rank 1 raised RuntimeError: sizes differ\nin two lines"
    return RankError("running `train.py`", found=found, rank=1, host="here", rank_traceback=TRACEBACK)


def test_foretell_says_what_where_and_what_was_found() -> None:
    """In one line, with the codes to look up; one that is said already is not said again."""
    error = make_error()
    place = CodeLine(file="/project/train.py", line=38)
    finding = Finding(
        code="DDP202", name="shape", severity="error", summary="rank 1 has 3 rows", place=place, why="x is cut"
    )
    error.findings = Findings([finding])
    said = "rank 1 raised RuntimeError: sizes differ, at /project/train.py:40  loss.backward()"
    assert foretell(error) == f"{said}, DDP202 shape: rank 1 has 3 rows, /project/train.py:38"
    error.found = f"rank 1 has 3 rows (DDP202). So {error.found}"
    assert foretell(error) == "rank 1 has 3 rows (DDP202); x is cut"
    assert foretell(RendezvousError("watching node 1", found="no sign of it")) == "no sign of it"


def test_forerunner_is_due_once_and_only_after_a_while() -> None:
    """A rank that ends at once has its report at once."""
    said: list[str] = []
    forerunner = EarlyNotice(said.append)
    assert not forerunner.is_due(0.1)
    assert forerunner.is_due(0.4)
    forerunner.tell(make_error())
    forerunner.tell(make_error())
    assert not forerunner.is_due(9.0)
    assert len(said) == 1
    assert said[0].endswith("; the report follows when the ranks have ended")
