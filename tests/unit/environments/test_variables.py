# SPDX-License-Identifier: Apache-2.0
"""What the readers of variables share."""

from __future__ import annotations

import pytest

from ddpilot.environments.variables import is_loopback


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("node1", False), ("", False)],
)
def test_is_loopback_knows_this_machines_own_addresses(host: str, expected: bool) -> None:
    """Names other than localhost are not looked up."""
    assert is_loopback(host) is expected
