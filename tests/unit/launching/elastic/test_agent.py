# SPDX-License-Identifier: Apache-2.0
"""The line ahead of a report."""

from __future__ import annotations

from ddpilot.errors import RankError, RendezvousError
from ddpilot.findings.display import Findings
from ddpilot.findings.finding import Finding
from ddpilot.launching.elastic.agent import EarlyNotice, summarize
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


def test_summarize_has_what_where_and_what_was_found() -> None:
    """In one line, with the codes to look up; a code that the message contains is not repeated."""
    error = make_error()
    place = CodeLine(file="/project/train.py", line=38)
    finding = Finding(
        code="DDP202", name="shape", severity="error", summary="rank 1 has 3 rows", place=place, why="x is cut"
    )
    error.findings = Findings([finding])
    said = "rank 1 raised RuntimeError: sizes differ, at /project/train.py:40  loss.backward()"
    assert summarize(error) == f"{said}, DDP202 shape: rank 1 has 3 rows, /project/train.py:38"
    error.found = f"rank 1 has 3 rows (DDP202). So {error.found}"
    assert summarize(error) == "rank 1 has 3 rows (DDP202); x is cut"
    assert summarize(RendezvousError("watching node 1", found="no heartbeat")) == "no heartbeat"


def test_notice_is_due_once_and_only_after_a_while() -> None:
    """A rank that ends at once has its report at once."""
    said: list[str] = []
    notice = EarlyNotice(said.append)
    assert not notice.is_due(0.1)
    assert notice.is_due(0.4)
    notice.show(make_error())
    notice.show(make_error())
    assert not notice.is_due(9.0)
    assert len(said) == 1
    assert said[0].endswith("; the report follows once the ranks have exited")
