# SPDX-License-Identifier: Apache-2.0
"""What a rank raised, as a finding."""

from __future__ import annotations

import sysconfig

import pytest

from ddpilot.findings.finding import Finding
from ddpilot.watch.known import find_known_error, is_explained
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


@pytest.mark.parametrize(
    ("known", "recorded", "adds_nothing"),
    [
        ("DDP202", ["DDP203"], True),
        ("DDP202", ["DDP208"], True),
        ("DDP202", ["DDP303"], True),
        ("DDP603", ["DDP202"], True),
        ("DDP603", ["DDP209"], False),
        ("DDP202", ["DDP209"], False),
        ("DDP202", ["DDP406"], False),
        ("DDP202", [], False),
        ("DDP218", ["DDP201"], True),
        ("DDP308", ["DDP212"], True),
        ("DDP308", ["DDP310"], True),
        ("DDP308", ["DDP207"], False),
        ("DDP103", ["DDP207"], False),
        ("DDP209", [], True),
    ],
)
def test_what_was_recorded_goes_before_what_a_message_may_mean(
    known: str, recorded: list[str], adds_nothing: bool
) -> None:
    """gloo says that sizes differ whatever ranks do not agree about."""
    assert is_explained(finding(known), [finding(code) for code in recorded]) is adds_nothing


def finding(code: str) -> Finding:
    """Any of this code."""
    return Finding(code=code, name="any", severity="error", summary=code)
