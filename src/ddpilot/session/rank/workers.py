# SPDX-License-Identifier: Apache-2.0
"""End the workers of an abandoned `DataLoader` iteration within one second, all at once."""

from __future__ import annotations

import functools

from torch.utils.data import _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ddpilot.session.rank.hurried import uninterrupted

_GRACE_S = 1.0
"""Seconds that all workers of an iteration together have to finish their current samples before they are terminated."""


def end_workers_soon() -> None:
    """Give the workers of an iterator that is deleted `_GRACE_S` together, where torch gives each of them 5 s.

    Deleting an iterator waits for its workers: with two busy workers, an error in the loop would be shown, and an
    interrupt would take effect, only after ten seconds. An iteration that is completed is not affected.
    """
    original = _MultiProcessingDataLoaderIter.__del__

    @functools.wraps(original)
    def end(iterator: _MultiProcessingDataLoaderIter) -> None:
        before = _utils.MP_STATUS_CHECK_INTERVAL
        _utils.MP_STATUS_CHECK_INTERVAL = _GRACE_S / max(1, len(getattr(iterator, "_workers", ())))
        try:
            with uninterrupted():  # exceptions in a finalizer are printed and ignored
                original(iterator)
        finally:
            _utils.MP_STATUS_CHECK_INTERVAL = before

    _MultiProcessingDataLoaderIter.__del__ = end  # type: ignore[method-assign]
