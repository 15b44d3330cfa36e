# SPDX-License-Identifier: Apache-2.0
"""Where the project can be found on the web."""

from __future__ import annotations

PROJECT_URL = ""
"""Address of the repository, without a final `/`; empty until there is one."""


def page_url(path: str) -> str:
    """Return the address of a page of the repository, such as ``docs/faq.md``; empty if there is no `PROJECT_URL`."""
    return f"{PROJECT_URL}/blob/main/{path}" if PROJECT_URL else ""
