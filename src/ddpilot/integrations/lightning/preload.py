# SPDX-License-Identifier: Apache-2.0
"""Imported before ranks are forked: nearly all of Lightning's slow imports, but nothing that reads its rank.

Each rank would otherwise import torch's compiler in every fit and validation.
"""

from __future__ import annotations

from ddpilot.integrations.libraries import import_quietly

import_quietly("torchmetrics", "torch._dynamo")
