# SPDX-License-Identifier: Apache-2.0
"""The address of the repository. Metadata and links are made from it; nothing else contains it."""

from __future__ import annotations

PROJECT_URL = ""
"""Such as "https://github.com/NAME/ddpilot", without a slash at the end; "" while there is no public repository."""


def page_url(path: str) -> str:
    """Return the address of a page of the repository, such as ``docs/faq.md``; empty if there is no `PROJECT_URL`."""
    return f"{PROJECT_URL}/blob/main/{path}" if PROJECT_URL else ""
