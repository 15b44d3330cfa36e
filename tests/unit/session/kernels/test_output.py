# SPDX-License-Identifier: Apache-2.0
"""Log lines of torch's C++ code about a group that is being freed are removed."""

from __future__ import annotations

import pytest

from ddpilot.launching.spawning import Wrote
from ddpilot.session.kernels.event_router import Event, EventRouter
from ddpilot.session.kernels.output import NativeOutput, TorchLogFilter

TORCH_LOG = (
    b"[W1121 17:04:18.543821801 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=55): Broken pipe\n"
    b"Exception raised from sendBytes at /pytorch/Utils.hpp:758 (most recent call first):\n"
    b"frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f21a8379b8d in libc10.so)\n"
    b"<omitting python frames>\n"
    b"frame #49: <unknown function> + 0x9f41 (0x7f21a9ca1f41 in _asyncio.so)\n"
    b"\n"
)


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_torch_logs_are_removed_for_any_size_of_chunks(size: int) -> None:
    """The user's own lines around them are shown, also those that look similar."""
    log_filter = TorchLogFilter()
    log_filter.ranks.add(1)
    written = b"mine\n" + TORCH_LOG + b"[W] mine too\nframe #0: mine\n\n" + b"[rank1]:" + TORCH_LOG + b"last"
    shown = b"".join(log_filter.filter(1, written[at : at + size]) for at in range(0, len(written), size))
    assert shown == b"mine\n[W] mine too\nframe #0: mine\n\nlast"


def test_torch_logs_are_shown_of_ranks_that_are_not_being_freed() -> None:
    """Before, on other ranks, and once the group was rebuilt; a line that was held back is shown then."""
    log_filter = TorchLogFilter()
    assert log_filter.filter(0, TORCH_LOG) == TORCH_LOG
    log_filter.ranks.add(0)
    assert log_filter.filter(1, TORCH_LOG) == TORCH_LOG
    assert log_filter.filter(0, TORCH_LOG + b"[unfinished") == b""
    log_filter.ranks.discard(0)
    assert log_filter.filter(0, b"") == b"[unfinished"
    assert log_filter.filter(0, TORCH_LOG) == TORCH_LOG


def test_native_output_shows_a_held_line_and_keeps_the_last_lines() -> None:
    """What is removed is not among the last lines either."""
    shown: list[Event] = []
    output = NativeOutput(EventRouter(shown.append, lambda: None))
    output.hide_torch_logs([0, 1])
    output.take(Wrote(0, "stderr", TORCH_LOG + b"mine\n[held"))
    output.show_torch_logs([0, 1])
    assert shown == [Wrote(0, "stderr", b"mine\n"), Wrote(0, "stderr", b"[held")]
    assert output.tail.last_lines(0) == ("mine",)
