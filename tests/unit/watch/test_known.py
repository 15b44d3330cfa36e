# SPDX-License-Identifier: Apache-2.0
"""What a rank raised, as a finding."""

from __future__ import annotations

import sysconfig

from ddpilot.watch.known import find_known_error
from ddpilot.watch.view import ErrorView

TRACEBACK = f"""Traceback (most recent call last):
  File "train.py", line 88, in train
    loss.backward()
  File "{sysconfig.get_paths()["purelib"]}/torch/_tensor.py", line 600, in backward
    torch.autograd.backward(
RuntimeError: Expected to mark a variable ready only once.
"""


def test_find_known_error_names_the_page_and_the_users_line() -> None:
    """The innermost line that is not of an installed library, with its text."""
    message = "Expected to mark a variable ready only once. This error is caused by one of the following reasons"
    finding = find_known_error(1, ErrorView(type_name="RuntimeError", message=message, traceback=TRACEBACK))
    assert finding is not None
    assert (finding.code, finding.name, finding.ranks) == ("DDP311", "ready-twice", (1,))
    assert str(finding.place) == "train.py:88  loss.backward()"
    assert finding.fix == "`checkpoint(..., use_reentrant=False)`."


def test_find_known_error_is_silent_about_what_no_page_knows() -> None:
    """A user's own exception says itself what it is."""
    assert find_known_error(0, ErrorView(type_name="KeyError", message="'label'", traceback=TRACEBACK)) is None
