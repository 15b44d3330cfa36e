# SPDX-License-Identifier: Apache-2.0
"""Callbacks for `Trainer`: logs, monitors, schedules and early stopping."""

from __future__ import annotations

from ddpilot.trainer.callback import Callback
from ddpilot.trainer.callbacks.best_epoch import BestWeights, EarlyStopping
from ddpilot.trainer.callbacks.logs import CsvLog, JsonLinesLog, MLflowLog, TensorBoardLog, WandbLog
from ddpilot.trainer.callbacks.monitors import LRMonitor, Norms
from ddpilot.trainer.callbacks.performance import GarbageCollection, Profile, Timers
from ddpilot.trainer.callbacks.pictures import Pictures
from ddpilot.trainer.callbacks.schedule import Schedule

__all__ = [
    "BestWeights",
    "Callback",
    "CsvLog",
    "EarlyStopping",
    "GarbageCollection",
    "JsonLinesLog",
    "LRMonitor",
    "MLflowLog",
    "Norms",
    "Pictures",
    "Profile",
    "Schedule",
    "TensorBoardLog",
    "Timers",
    "WandbLog",
]
