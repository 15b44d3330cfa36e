# SPDX-License-Identifier: Apache-2.0
"""Options as dataclasses, dictionaries or keywords."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddpilot.data.options import LoaderOptions
from ddpilot.training.models.ddp_options import DDPOptions
from ddpilot.training.options import CheckpointOptions, keywords_of

WEIGHTS = np.ones(4)


@pytest.mark.parametrize(
    ("options", "keywords"),
    [
        (None, {}),
        ({"comm": "bf16"}, {"comm": "bf16"}),
        (DDPOptions(), {}),
        (DDPOptions(comm="bf16", more={"init_sync": False}), {"comm": "bf16", "init_sync": False}),
        (CheckpointOptions(checkpoint_dir="runs", keep=None), {"checkpoint_dir": "runs", "keep": None}),
        (LoaderOptions(weights=WEIGHTS, shuffle=False), {"weights": WEIGHTS, "shuffle": False}),
    ],
)
def test_keywords_of_takes_what_differs_from_the_defaults(options: Any, keywords: dict[str, Any]) -> None:
    """Of a dataclass; all items of a dictionary."""
    assert keywords_of(options) == keywords
