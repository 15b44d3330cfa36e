# SPDX-License-Identifier: Apache-2.0
"""The rules of `ddpilot lint`, by subject, and all in the order of codes. Imports `lint.rule` and what is below."""

from __future__ import annotations

from ddpilot.lint.rule import Rule
from ddpilot.lint.rules import (
    checkpoints,
    collectives,
    data,
    launch,
    libraries,
    metrics,
    models,
    processes,
    seeds,
    trainers,
)

_MODULES = (
    checkpoints, collectives, data, launch, libraries, metrics, models, processes, seeds, trainers
)  # fmt: skip
RULES: tuple[Rule, ...] = tuple(
    sorted((r for module in _MODULES for r in vars(module).values() if isinstance(r, Rule)), key=lambda r: r.code)
)
CODES = tuple(dict.fromkeys(each.code for each in RULES))
