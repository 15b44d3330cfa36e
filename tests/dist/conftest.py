# SPDX-License-Identifier: Apache-2.0
"""What tests on ranks need before the first of them."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def a_store_was_made() -> None:
    """torch keeps the pipe open that it makes for the first store of a process, which is no leak of a test's."""
    from torch._C._distributed_c10d import TCPStore

    TCPStore("127.0.0.1", 0, 1, is_master=True)
