# SPDX-License-Identifier: Apache-2.0
"""Cut the Python stacks of ranks down to what the user wrote."""

from __future__ import annotations

import re

from ddpilot.module_names import SESSION_REQUESTS

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line \d+ in .+$')


def trim_stack(text: str) -> str:
    """Return the frames of `text` (innermost first) that belong to the cell or function; "idle" if none is running."""
    frames = [(line, found["file"]) for line in text.splitlines() if (found := _FRAME.match(line))]
    if not frames:
        return "no answer: the process does not run Python code now"
    files = [file for _, file in frames]
    cells = [index for index, file in enumerate(files) if file.startswith("Cell In[")]
    calls = [index for index, file in enumerate(files) if file.endswith(SESSION_REQUESTS)]
    end = cells[-1] + 1 if cells else calls[0] if calls else 0
    return "\n".join(line for line, _ in frames[:end]) or "idle"
