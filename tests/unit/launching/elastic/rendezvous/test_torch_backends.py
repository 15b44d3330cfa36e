# SPDX-License-Identifier: Apache-2.0
"""Waiting in a thread."""

from __future__ import annotations

import pytest

from ddpilot.launching.elastic.rendezvous.torch_backends import wait_in_thread


def test_wait_in_thread_returns_and_raises_what_the_call_does() -> None:
    """Like a direct call, and without a notice for a short wait."""
    said: list[str] = []
    assert wait_in_thread(lambda: 7, said.append, str) == 7
    with pytest.raises(ValueError, match="bad"):
        wait_in_thread(lambda: int("bad"), said.append, str)
    assert said == []
