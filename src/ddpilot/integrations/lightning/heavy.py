# SPDX-License-Identifier: Apache-2.0
"""Imported before the ranks are forked: nearly all of Lightning's import, and nothing of it that knows its rank."""

from __future__ import annotations

from ddpilot.integrations.preloading import import_quietly

import_quietly("torchmetrics")
