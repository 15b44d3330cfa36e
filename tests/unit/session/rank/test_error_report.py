# SPDX-License-Identifier: Apache-2.0
"""What a rank says of an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddpilot.errors import GroupError
from ddpilot.session.rank.error_report import came_from_backward, cell_traceback, holds_group, report_error


class BaseExceptionGroup(Exception):  # noqa: N818  # as Python 3.10's backport names it
    """A group of exceptions."""


def _raised(code: str, error: BaseException) -> BaseException:
    try:
        exec(compile(code, "Cell In[7]", "exec"), {"error": error})
    except type(error) as caught:
        return caught
    raise AssertionError


def test_cell_traceback_begins_at_the_cell() -> None:
    """What called it is ddpilot's and IPython's."""
    text = cell_traceback(_raised("\nraise error", KeyError("k")))
    assert text.splitlines()[1].strip() == 'File "Cell In[7]", line 2, in <module>'
    assert "_raised" not in text


def test_cell_traceback_of_an_error_of_ddpilot_has_the_users_lines_only() -> None:
    """Where it is shown without IPython, in a hurry."""
    library = compile("def enter(error):\n    raise error", "/usr/lib/python3/dist-packages/torch/x.py", "exec")
    names: dict[str, Any] = {"error": GroupError("entering the group", found="rank 1 is missing")}
    exec(library, names)
    with pytest.raises(GroupError) as caught:
        exec(compile("\nenter(error)", "Cell In[7]", "exec"), names)
    text = cell_traceback(caught.value)
    assert 'File "Cell In[7]", line 2, in <module>' in text
    assert "torch/x.py" not in text


def test_holds_group_also_where_it_was_raised_for_one() -> None:
    """By the name of the class, at any place of the chain."""
    assert holds_group(BaseExceptionGroup())
    assert holds_group(_raised("try: raise error\nexcept Exception: raise type(error)", BaseExceptionGroup()))
    later = ValueError()
    later.__context__ = BaseExceptionGroup()
    assert holds_group(later)
    assert not holds_group(ValueError())
    assert not holds_group(None)


def test_report_error_has_the_cells_text_or_the_errors_own() -> None:
    """Where no traceback is given there is the last line of one."""
    report = report_error(ValueError("wrong"), "", 1.5, 3, torch.device("cpu"))
    assert (report.status, report.type_name, report.message) == ("error", "ValueError", "wrong")
    assert (report.traceback, report.time_s, report.num_collectives) == ("ValueError: wrong\n", 1.5, 3)
    assert not came_from_backward(ValueError())
    assert report.device_error == ""
