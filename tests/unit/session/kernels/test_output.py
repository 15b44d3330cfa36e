# SPDX-License-Identifier: Apache-2.0
"""What torch's C++ says of a group that is taken away under it, and nothing else, is left out."""

from __future__ import annotations

import pytest

from ddpilot.session.kernels.output import TorchLogFilter
from ddpilot.session.protocol.report import FREE, REQUEST

NOISE = (
    b"[W1121 17:04:18.543821801 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=55): Broken pipe\n"
    b"Exception raised from sendBytes at /pytorch/Utils.hpp:758 (most recent call first):\n"
    b"frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f21a8379b8d in libc10.so)\n"
    b"<omitting python frames>\n"
    b"frame #49: <unknown function> + 0x9f41 (0x7f21a9ca1f41 in _asyncio.so)\n"
    b"\n"
)


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_noise_is_left_out_however_it_is_cut(size: int) -> None:
    """The person's own lines around it stay, also those that look a little like it."""
    noise = TorchLogFilter()
    noise.sending(1, FREE, {}, "a")
    written = b"mine\n" + NOISE + b"[W] mine too\nframe #0: mine\n\n" + b"[rank1]:" + NOISE + b"last"
    shown = b"".join(noise.filter(1, written[at : at + size]) for at in range(0, len(written), size))
    assert shown == b"mine\n[W] mine too\nframe #0: mine\n\nlast"


def test_noise_is_shown_where_ddpilot_does_not_free_the_rank() -> None:
    """Before, on other ranks, and once the group is made anew."""
    noise = TorchLogFilter()
    assert noise.filter(0, NOISE) == NOISE
    noise.sending(0, FREE, {}, "a")
    assert noise.filter(1, NOISE) == NOISE
    noise.sending(0, REQUEST, {"verb": "rebuild"}, "b")
    assert not noise.ends_with(0, "a")
    assert noise.filter(0, NOISE + b"[unfinished") == b""
    assert noise.ends_with(0, "b")
    assert noise.filter(0, b"") == b"[unfinished"
    assert noise.filter(0, NOISE) == NOISE


def test_noise_is_shown_from_the_next_cell_on_and_when_the_rank_died() -> None:
    """Where no group was made anew."""
    noise = TorchLogFilter()
    for rank in (0, 1):
        noise.sending(rank, FREE, {}, "a")
    noise.sending(0, "execute_request", {"code": "1"}, "b")
    noise.forget(1)
    assert [noise.filter(rank, NOISE) for rank in (0, 1)] == [NOISE, NOISE]
