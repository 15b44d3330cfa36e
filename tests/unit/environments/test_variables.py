# SPDX-License-Identifier: Apache-2.0
"""What the readers of variables share."""

from __future__ import annotations

import pytest

from ddpilot.environments.variables import is_loopback, read_switch
from ddpilot.errors import TopologyError


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("node1", False), ("", False)],
)
def test_is_loopback_knows_this_machines_own_addresses(host: str, expected: bool) -> None:
    """Names other than localhost are not looked up."""
    assert is_loopback(host) is expected


def test_read_switch_takes_the_usual_words_and_names_the_variable_otherwise() -> None:
    """In any case; None if it is empty or not set."""
    words = {"1": True, "Yes": True, " true ": True, "ON": True, "0": False, "no": False, "False": False, "off": False}
    assert {word: read_switch({"A": word}, "A") for word in words} == words
    assert read_switch({"A": ""}, "A") is read_switch({}, "A") is None
    with pytest.raises(TopologyError, match="^reading A: A='2'. Set it to 1 or 0, or unset it$") as caught:
        read_switch({"A": "2"}, "A")
    assert caught.value.variable == "A"
