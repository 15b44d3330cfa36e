# SPDX-License-Identifier: Apache-2.0
"""Signals before there are ranks."""

from __future__ import annotations

import os
import signal

import pytest

from ddpilot.launching.elastic.options import StopSignal, signals_raise


def test_signals_raise_and_everything_is_as_before_afterwards() -> None:
    """Handlers, including SIGCHLD's, and the variable that torch's agent reads."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers], dict(os.environ)
    with signals_raise(["SIGTERM", "SIGUSR1"]):
        assert os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGUSR1"
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
        with pytest.raises(StopSignal) as caught:
            signal.raise_signal(signal.SIGUSR1)
        assert caught.value.number == signal.SIGUSR1
    assert ([signal.getsignal(number) for number in numbers], dict(os.environ)) == before
