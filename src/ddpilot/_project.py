# SPDX-License-Identifier: Apache-2.0
"""The address of the repository. Metadata and links are made from it; nothing else contains it."""

from __future__ import annotations

PROJECT_URL = ""
"""Such as "https://github.com/NAME/ddpilot", without a slash at the end; "" while there is no public repository."""
