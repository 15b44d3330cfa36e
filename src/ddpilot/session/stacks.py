# SPDX-License-Identifier: Apache-2.0
"""Cut a stack that Python's fault handler wrote down to what the user wrote."""

from __future__ import annotations

import re

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line \d+ in .+$')
_REQUESTS = "/ddpilot/session/rank/requests.py"


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
