# SPDX-License-Identifier: Apache-2.0
"""Callbacks for `Trainer`: logs, monitors, schedules and early stopping."""

from __future__ import annotations

from ddpilot.trainer.callback import Callback
from ddpilot.trainer.callbacks.best_weights import BestWeights
from ddpilot.trainer.callbacks.csv_log import CsvLog
from ddpilot.trainer.callbacks.early_stopping import EarlyStopping
from ddpilot.trainer.callbacks.garbage_collection import GarbageCollection
from ddpilot.trainer.callbacks.json_lines_log import JsonLinesLog
from ddpilot.trainer.callbacks.monitors import LRMonitor, Norms
from ddpilot.trainer.callbacks.pictures import Pictures
from ddpilot.trainer.callbacks.schedule import Schedule
from ddpilot.trainer.callbacks.tensorboard_log import TensorBoardLog
from ddpilot.trainer.callbacks.timers import Timers
from ddpilot.trainer.callbacks.wandb_log import WandbLog

__all__ = [
    "BestWeights",
    "Callback",
    "CsvLog",
    "EarlyStopping",
    "GarbageCollection",
    "JsonLinesLog",
    "LRMonitor",
    "Norms",
    "Pictures",
    "Schedule",
    "TensorBoardLog",
    "Timers",
    "WandbLog",
]
