# SPDX-License-Identifier: Apache-2.0
"""Train with DistributedDataParallel from a notebook, a script or Slurm with the same function and the same numbers.

The public names are declared here and imported on first use: importing ddpilot imports neither torch nor IPython and
starts no process or thread.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    """Version of the installed package, such as "0.1.0"."""

    from ddpilot.checkpoint.collective import CollectiveCheckpoints
    from ddpilot.checkpoint.directory import CheckpointDir
    from ddpilot.checkpoint.format import Checkpoint
    from ddpilot.checkpoint.manifest import RunProgress
    from ddpilot.checkpoint.weights import load_into, load_weights, merge_shards
    from ddpilot.data.options import LoaderOptions
    from ddpilot.data.shards.files import JsonLinesShards, ParquetShards, ShardedDataset, WebDatasetShards
    from ddpilot.diagnose.diagnosis import Diagnosis
    from ddpilot.diagnose.doctor import doctor
    from ddpilot.diagnose.ladder.ladder import check_program
    from ddpilot.diagnose.ladder.result import ProgramDiagnosis
    from ddpilot.diagnose.verify.result import Verification
    from ddpilot.diagnose.verify.verify import verify
    from ddpilot.environments.detect import topology
    from ddpilot.environments.topology import Topology
    from ddpilot.errors import (
        CheckpointError,
        CorruptCheckpointError,
        DataError,
        DdpilotError,
        GroupError,
        KubernetesError,
        LaunchError,
        LaunchInterrupted,
        LaunchTimeoutError,
        LoopError,
        MismatchedCheckpointError,
        NonFiniteError,
        OutOfMemoryError,
        RankError,
        RecordError,
        RemoteRankError,
        RendezvousError,
        ShipError,
        SlurmError,
        TopologyError,
        WatchError,
    )
    from ddpilot.findings.finding import Finding
    from ddpilot.group.decorators import on_ranks, rank_zero_only
    from ddpilot.group.init_group import init_group
    from ddpilot.group.process_group import Group
    from ddpilot.group.protocol import FakeGroup
    from ddpilot.launcher import Launcher, launch
    from ddpilot.launching.elastic.options import RunOptions
    from ddpilot.launching.elastic.run import run_script
    from ddpilot.launching.shipping.pickling import RankResults
    from ddpilot.record.flight_ring.log import RankLog
    from ddpilot.record.flight_ring.reader import read_ring
    from ddpilot.record.journal import Journal, read_journal
    from ddpilot.session.apps import App, AppContext
    from ddpilot.session.options import SessionOptions
    from ddpilot.session.session import CellResult, Session
    from ddpilot.slurm.launcher import SlurmJob, SlurmLauncher
    from ddpilot.slurm.options import JobOptions
    from ddpilot.trainer.callback import Callback
    from ddpilot.trainer.history import History
    from ddpilot.trainer.run import Run
    from ddpilot.trainer.trainer import Trainer
    from ddpilot.training.batch_size import BatchSizeSearch, find_batch_size, scale_lr
    from ddpilot.training.coordination.out_of_memory import JointTry, joint_try
    from ddpilot.training.device_placement import ensure_on_device
    from ddpilot.training.evaluation.evaluate import read_predictions
    from ddpilot.training.learning_rate import LearningRateSearch, find_learning_rate
    from ddpilot.training.logs.loggers import (
        CsvLogger,
        JsonLinesLogger,
        Logger,
        LogStart,
        MLflowLogger,
        TensorBoardLogger,
        WandbLogger,
    )
    from ddpilot.training.loop import Loop
    from ddpilot.training.models.comm_hooks import PowerSGD
    from ddpilot.training.models.ddp import DDPOptions, unwrap
    from ddpilot.training.models.optimizers import full_state, load_full_state
    from ddpilot.training.models.parameters import ParameterCount, count_parameters, freeze, unfreeze
    from ddpilot.training.models.sharding import ParameterSharding
    from ddpilot.training.options import CheckpointOptions
    from ddpilot.training.step.weight_averages import Averaging

_HOMES = {
    "App": "ddpilot.session.apps",
    "AppContext": "ddpilot.session.apps",
    "Averaging": "ddpilot.training.step.weight_averages",
    "BatchSizeSearch": "ddpilot.training.batch_size",
    "Callback": "ddpilot.trainer.callback",
    "CellResult": "ddpilot.session.session",
    "Checkpoint": "ddpilot.checkpoint.format",
    "CheckpointDir": "ddpilot.checkpoint.directory",
    "CheckpointError": "ddpilot.errors",
    "CheckpointOptions": "ddpilot.training.options",
    "CollectiveCheckpoints": "ddpilot.checkpoint.collective",
    "CorruptCheckpointError": "ddpilot.errors",
    "CsvLogger": "ddpilot.training.logs.loggers",
    "DDPOptions": "ddpilot.training.models.ddp",
    "DataError": "ddpilot.errors",
    "DdpilotError": "ddpilot.errors",
    "Diagnosis": "ddpilot.diagnose.diagnosis",
    "FakeGroup": "ddpilot.group.protocol",
    "Finding": "ddpilot.findings.finding",
    "Group": "ddpilot.group.process_group",
    "GroupError": "ddpilot.errors",
    "History": "ddpilot.trainer.history",
    "JobOptions": "ddpilot.slurm.options",
    "JointTry": "ddpilot.training.coordination.out_of_memory",
    "Journal": "ddpilot.record.journal",
    "JsonLinesLogger": "ddpilot.training.logs.loggers",
    "JsonLinesShards": "ddpilot.data.shards.files",
    "KubernetesError": "ddpilot.errors",
    "LaunchError": "ddpilot.errors",
    "LaunchInterrupted": "ddpilot.errors",
    "LaunchTimeoutError": "ddpilot.errors",
    "Launcher": "ddpilot.launcher",
    "LearningRateSearch": "ddpilot.training.learning_rate",
    "LoaderOptions": "ddpilot.data.options",
    "LogStart": "ddpilot.training.logs.loggers",
    "Logger": "ddpilot.training.logs.loggers",
    "Loop": "ddpilot.training.loop",
    "LoopError": "ddpilot.errors",
    "MLflowLogger": "ddpilot.training.logs.loggers",
    "MismatchedCheckpointError": "ddpilot.errors",
    "NonFiniteError": "ddpilot.errors",
    "OutOfMemoryError": "ddpilot.errors",
    "ParameterCount": "ddpilot.training.models.parameters",
    "ParameterSharding": "ddpilot.training.models.sharding",
    "ParquetShards": "ddpilot.data.shards.files",
    "PowerSGD": "ddpilot.training.models.comm_hooks",
    "ProgramDiagnosis": "ddpilot.diagnose.ladder.result",
    "RankError": "ddpilot.errors",
    "RankLog": "ddpilot.record.flight_ring.log",
    "RankResults": "ddpilot.launching.shipping.pickling",
    "RecordError": "ddpilot.errors",
    "RemoteRankError": "ddpilot.errors",
    "RendezvousError": "ddpilot.errors",
    "Run": "ddpilot.trainer.run",
    "RunOptions": "ddpilot.launching.elastic.options",
    "RunProgress": "ddpilot.checkpoint.manifest",
    "Session": "ddpilot.session.session",
    "SessionOptions": "ddpilot.session.options",
    "ShardedDataset": "ddpilot.data.shards.files",
    "ShipError": "ddpilot.errors",
    "SlurmError": "ddpilot.errors",
    "SlurmJob": "ddpilot.slurm.launcher",
    "SlurmLauncher": "ddpilot.slurm.launcher",
    "TensorBoardLogger": "ddpilot.training.logs.loggers",
    "Topology": "ddpilot.environments.topology",
    "TopologyError": "ddpilot.errors",
    "Trainer": "ddpilot.trainer.trainer",
    "Verification": "ddpilot.diagnose.verify.result",
    "WandbLogger": "ddpilot.training.logs.loggers",
    "WatchError": "ddpilot.errors",
    "WebDatasetShards": "ddpilot.data.shards.files",
    "check_program": "ddpilot.diagnose.ladder.ladder",
    "count_parameters": "ddpilot.training.models.parameters",
    "doctor": "ddpilot.diagnose.doctor",
    "ensure_on_device": "ddpilot.training.device_placement",
    "find_batch_size": "ddpilot.training.batch_size",
    "find_learning_rate": "ddpilot.training.learning_rate",
    "freeze": "ddpilot.training.models.parameters",
    "full_state": "ddpilot.training.models.optimizers",
    "init_group": "ddpilot.group.init_group",
    "joint_try": "ddpilot.training.coordination.out_of_memory",
    "launch": "ddpilot.launcher",
    "load_full_state": "ddpilot.training.models.optimizers",
    "load_into": "ddpilot.checkpoint.weights",
    "load_weights": "ddpilot.checkpoint.weights",
    "merge_shards": "ddpilot.checkpoint.weights",
    "on_ranks": "ddpilot.group.decorators",
    "rank_zero_only": "ddpilot.group.decorators",
    "read_journal": "ddpilot.record.journal",
    "read_predictions": "ddpilot.training.evaluation.evaluate",
    "read_ring": "ddpilot.record.flight_ring.reader",
    "run_script": "ddpilot.launching.elastic.run",
    "scale_lr": "ddpilot.training.batch_size",
    "topology": "ddpilot.environments.detect",
    "unfreeze": "ddpilot.training.models.parameters",
    "unwrap": "ddpilot.training.models.ddp",
    "verify": "ddpilot.diagnose.verify.verify",
}

_HOOKS = {
    "load_ipython_extension": "ddpilot.magics.extension",
    "unload_ipython_extension": "ddpilot.magics.extension",
}
"""Functions that IPython calls for `%load_ext ddpilot`; they are not public names."""

__all__ = [
    "App",
    "AppContext",
    "Averaging",
    "BatchSizeSearch",
    "Callback",
    "CellResult",
    "Checkpoint",
    "CheckpointDir",
    "CheckpointError",
    "CheckpointOptions",
    "CollectiveCheckpoints",
    "CorruptCheckpointError",
    "CsvLogger",
    "DDPOptions",
    "DataError",
    "DdpilotError",
    "Diagnosis",
    "FakeGroup",
    "Finding",
    "Group",
    "GroupError",
    "History",
    "JobOptions",
    "JointTry",
    "Journal",
    "JsonLinesLogger",
    "JsonLinesShards",
    "KubernetesError",
    "LaunchError",
    "LaunchInterrupted",
    "LaunchTimeoutError",
    "Launcher",
    "LearningRateSearch",
    "LoaderOptions",
    "LogStart",
    "Logger",
    "Loop",
    "LoopError",
    "MLflowLogger",
    "MismatchedCheckpointError",
    "NonFiniteError",
    "OutOfMemoryError",
    "ParameterCount",
    "ParameterSharding",
    "ParquetShards",
    "PowerSGD",
    "ProgramDiagnosis",
    "RankError",
    "RankLog",
    "RankResults",
    "RecordError",
    "RemoteRankError",
    "RendezvousError",
    "Run",
    "RunOptions",
    "RunProgress",
    "Session",
    "SessionOptions",
    "ShardedDataset",
    "ShipError",
    "SlurmError",
    "SlurmJob",
    "SlurmLauncher",
    "TensorBoardLogger",
    "Topology",
    "TopologyError",
    "Trainer",
    "Verification",
    "WandbLogger",
    "WatchError",
    "WebDatasetShards",
    "__version__",
    "check_program",
    "count_parameters",
    "doctor",
    "ensure_on_device",
    "find_batch_size",
    "find_learning_rate",
    "freeze",
    "full_state",
    "init_group",
    "joint_try",
    "launch",
    "load_full_state",
    "load_into",
    "load_weights",
    "merge_shards",
    "on_ranks",
    "rank_zero_only",
    "read_journal",
    "read_predictions",
    "read_ring",
    "run_script",
    "scale_lr",
    "topology",
    "unfreeze",
    "unwrap",
    "verify",
]


_MODULES = ("callbacks", "watch")
"""Public submodules, such as `ddpilot.watch.enable()`."""


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _read_version()
    if name in _MODULES:
        return importlib.import_module(f"ddpilot.{name}")
    home = _HOMES.get(name) or _HOOKS.get(name)
    if home is None:
        raise AttributeError(f"module 'ddpilot' has no attribute {name!r}; its public names are {', '.join(__all__)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def _read_version() -> str:
    from importlib.metadata import version

    globals()["__version__"] = found = version("ddpilot")
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
