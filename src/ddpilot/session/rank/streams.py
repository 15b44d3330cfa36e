# SPDX-License-Identifier: Apache-2.0
"""A rank's stdout and stderr: ipykernel's, which also take what UTF-8 cannot write."""

from __future__ import annotations

from typing import Any

from ipykernel.iostream import OutStream

from ddpilot.session.report import writable


class RankStream(OutStream):
    """Half a surrogate pair in a text would keep ipykernel's thread from sending anything more."""

    def write(self, string: Any) -> int:
        """Write `string`; raises TypeError for anything else, as every text stream does."""
        return super().write(writable(string) if isinstance(string, str) else string) or 0
