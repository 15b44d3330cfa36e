# SPDX-License-Identifier: Apache-2.0
"""`RankStream`: ipykernel's stdout and stderr stream, which also accepts text that UTF-8 cannot encode."""

from __future__ import annotations

from typing import Any

from ipykernel.iostream import OutStream

from ddpilot.session.protocol.report import writable


class RankStream(OutStream):
    """A lone surrogate in the output would keep ipykernel's thread from sending any more messages."""

    def write(self, string: Any) -> int:
        """Write `string`. Raises TypeError if it is not a string, like every text stream."""
        return super().write(writable(string) if isinstance(string, str) else string) or 0
