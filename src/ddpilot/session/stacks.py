# SPDX-License-Identifier: Apache-2.0
"""Stacks that Python's fault handler writes: gathered as they come, cut down to what the user wrote."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from ddpilot.session.events import Wrote

_LIMIT_S = 1.0
_PAUSE_S = 0.05
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line \d+ in .+$')
_REQUESTS = "/ddpilot/session/rank/requests.py"


class StackTexts:
    """What each of `ranks` writes into its stderr from now on."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._texts = {rank: bytearray() for rank in ranks}

    def take(self, wrote: Wrote) -> bool:
        """Keep it, where it is of a stderr that is waited for; whether it was kept."""
        if wrote.stream != "stderr" or wrote.rank not in self._texts:
            return False
        self._texts[wrote.rank] += wrote.data
        return True

    def await_all(self) -> None:
        """Wait until every rank has written and nothing more comes, a second at most."""
        deadline_s = time.monotonic() + _LIMIT_S
        seen = -1
        while time.monotonic() < deadline_s:
            time.sleep(_PAUSE_S)
            size = sum(map(len, self._texts.values()))
            if size == seen and all(self._texts.values()):
                return
            seen = size

    def texts(self) -> dict[int, str]:
        """What was written, by rank."""
        return {rank: text.decode(errors="replace") for rank, text in self._texts.items()}


def trim_stack(text: str) -> str:
    """The frames of `text` (innermost first) down to the cell's or the function's own; "idle" where neither runs."""
    frames = [(line, found["file"]) for line in text.splitlines() if (found := _FRAME.match(line))]
    if not frames:
        return "no answer: the process does not run Python code now"
    files = [file for _, file in frames]
    cells = [index for index, file in enumerate(files) if file.startswith("Cell In[")]
    calls = [index for index, file in enumerate(files) if file.endswith(_REQUESTS)]
    end = cells[-1] + 1 if cells else calls[0] if calls else 0
    return "\n".join(line for line, _ in frames[:end]) or "idle"
