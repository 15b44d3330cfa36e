# SPDX-License-Identifier: Apache-2.0
"""The report of a rank on an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddpilot.session.kernels.states import describe_device_error
from ddpilot.session.rank.cleanup import pays_to_empty
from ddpilot.session.rank.error_report import (
    came_from_backward,
    find_device_error,
    holds_group,
    report_error,
)


class BaseExceptionGroup(Exception):  # noqa: N818  # as Python 3.10's backport names it
    """A group of exceptions."""


def _raised(code: str, error: BaseException) -> BaseException:
    try:
        exec(compile(code, "Cell In[7]", "exec"), {"error": error})
    except type(error) as caught:
        return caught
    raise AssertionError


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
    """Without a traceback, its last line is used."""
    report = report_error(ValueError("wrong"), "", 1.5, 3, torch.device("cpu"))
    assert report.error == ("ValueError", "wrong", "ValueError: wrong\n")
    assert report.raised is not None
    assert (report.raised.time_s, report.num_collectives) == (1.5, 3)
    assert not came_from_backward(ValueError())
    assert report.device_error == ""


class Device:
    """A module of torch for a device, and its current stream."""

    def __init__(self, error: str = "", is_initialized: bool = True, is_capturing: bool = False) -> None:
        self.error, self.begun, self.captures = error, is_initialized, is_capturing

    def is_initialized(self) -> bool:
        return self.begun

    def is_current_stream_capturing(self) -> bool:
        return self.captures

    def query(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return False


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (
            Device("CUDA error: device-side assert triggered\nCUDA kernel errors might"),
            "CUDA error: device-side assert",
        ),
        (Device(), ""),
        (Device("not asked", is_initialized=False), ""),
        (Device("operation not permitted when stream is capturing", is_capturing=True), ""),
    ],
)
def test_find_device_error_asks_without_waiting(device: Device, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's query has the error; one that is busy, captures or was never used has none."""
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: device)
    found = find_device_error(torch.device("cuda:0"))
    assert found.startswith(expected)
    assert bool(found) is bool(expected)


def test_find_device_error_asks_nothing_of_the_cpu() -> None:
    """The CPU has no context that could fail."""
    assert find_device_error(torch.device("cpu")) == ""


def test_describe_device_error_says_what_is_lost_and_what_to_do() -> None:
    """With CUDA's own way to the line, and without for other devices."""
    text = describe_device_error(1, "CUDA error: device-side assert triggered", respawns=False)
    assert text.startswith(
        "rank 1: its device has failed and accepts no more work (CUDA error: device-side assert triggered)"
    )
    assert "`%ddp restart 1` starts it again; `CUDA_LAUNCH_BLOCKING=1` in `env` shows the line" in text
    assert describe_device_error(0, "lost", respawns=True).endswith("memory is lost, it is restarted")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((True, 0, 100), True), ((False, 12, 100), False), ((False, 13, 100), True), ((False, None, 0), True)],
)
def test_pays_to_empty_after_a_failure_and_where_much_is_unused(arguments: tuple[Any, ...], expected: bool) -> None:
    """More than an eighth of the memory, or if the unused amount is not known."""
    assert pays_to_empty(*arguments) is expected
