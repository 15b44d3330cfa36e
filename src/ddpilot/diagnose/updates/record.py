# SPDX-License-Identifier: Apache-2.0
"""Files of a recorded run: what is to be recorded, and for each rank its updates. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy

SPEC_VARIABLE = "DDPILOT_UPDATES"
"""Environment variable with the folder of the run, in which `RecordSpec.write` has put the specification."""
_SPEC_FILE = "spec.json"
KINDS = ("parameter", "buffer", "attribute", "input", "target", "loss weight")
"""Tensors of a first batch. ``attribute``: of a module, and not registered as a buffer."""


@dataclass(frozen=True, kw_only=True)
class RecordSpec:
    """Specification of a recorded run: the number of updates, and changes to the program."""

    num_updates: int | None
    """Updates after which the program ends; None: it runs to its end."""
    replicas: int = 1
    """Batches of one process are so many times as large: one process stands for so many ranks."""
    takes_turns: bool = False
    """Instead of larger batches, one process computes the gradients of each of the `replicas` ranks in turn, on the
    batches that `DistributedSampler` gives it, and steps with their mean."""
    is_float64: bool = False
    """Floating point numbers have 64 bits by default, and batches are converted."""
    has_dropout: bool = True
    """False: dropout keeps everything."""
    scales_losses: bool = True
    """False: a GradScaler neither scales losses nor skips steps."""
    orders_alike: bool = False
    """RandomSamplers draw their order from a seed of their own."""
    draws_alike: bool = False
    """Draws from torch's generators in training are equal for each row and at each call."""
    has_batch_statistics: bool = True
    """False: BatchNorm normalizes with its running statistics while training, too."""
    weighs_rows: bool = False
    """Each rank's loss is weighted by its number of rows, so that all rows have the same weight in the mean."""
    perturbs: bool = False
    """Every gradient is changed by about one unit in the last place, to see how rounding grows."""

    def write(self, folder: Path) -> None:
        """Write the specification into the folder of a run."""
        (folder / _SPEC_FILE).write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def read(cls, folder: Path) -> RecordSpec:
        """Return the specification in the folder of a run."""
        return cls(**json.loads((folder / _SPEC_FILE).read_text("utf-8")))


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of an optimizer. Ranks and runs are compared by its position, which is the key of its arrays."""

    key: str
    """Such as "0/3": the fourth parameter of the first optimizer."""
    name: str
    shape: tuple[int, ...]
    device: str
    in_ddp: bool
    """True if a DistributedDataParallel model reduces its gradient."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch that a DataLoader returned for training."""

    loader: int
    """Number of the DataLoader, by the order of their first batches."""
    indices: tuple[int, ...] = ()
    """Of the samples in the dataset; empty if unknown."""
    checksums: tuple[int, ...] = ()
    """Of the content of each sample; empty if the batch does not consist of rows."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One step of an optimizer and what led to it, on one rank."""

    optimizer: int
    """Number of the optimizer, by the order of their first steps."""
    number: int
    """Number of the step of this optimizer, from 0."""
    site: Mapping[str, Any]
    """The user's line that called `step`."""
    losses: tuple[float, ...] = ()
    """Values that `backward` was called on, since the step before."""
    batches: tuple[Batch, ...] = ()
    """Batches for training, since the step before."""
    inputs: tuple[int, ...] = ()
    """Checksum of the arguments of the first module that was called for each loss."""
    num_rows: int = 0
    """Size of the first dimension of these arguments, added up."""
    options: tuple[Mapping[str, float], ...] = ()
    """Numbers among the options of each parameter group, such as the learning rate."""
    generators: Mapping[str, int] = field(default_factory=dict)
    """Checksum of the state of each random number generator, by name."""
    duration_s: float = 0.0
    """Time since the step before, without that of recording the step; 0.0 for the first."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Update:
        """Return the update that was written as JSON."""
        batches = (
            Batch(loader=each["loader"], indices=tuple(each["indices"]), checksums=tuple(each["checksums"]))
            for each in values["batches"]
        )
        lists = {name: tuple(values[name]) for name in ("losses", "inputs", "options")}
        return cls(**{**values, **lists, "batches": tuple(batches)})


@dataclass(frozen=True, kw_only=True)
class Misplaced:
    """A tensor that is not on the rank's device."""

    kind: str
    """One of `KINDS`."""
    name: str
    """Kind and name, such as "buffer `model.head.mask`"."""
    device: str
    site: Mapping[str, Any] = field(default_factory=dict)
    """The user's line that called the model or the loss."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A file that a rank wrote by `torch.save`."""

    path: str
    site: Mapping[str, Any]
    """The user's line that called it."""
    has_prefix: bool = False
    """True if parameters in it have the names that a DDP wrapper gives them."""


@dataclass(frozen=True)
class ProgramFacts:
    """What a rank's program consists of, as far as its first updates show it."""

    rank: int
    world_size: int
    device: str = ""
    """The device that belongs to this rank, in torch's notation."""
    samplers: tuple[str, ...] = ()
    """Class name of the sampler of each DataLoader."""
    num_dropped_out: int = 0
    """Number of calls of dropout in training."""
    has_scaler: bool = False
    """True if a GradScaler scales losses."""
    draws: tuple[str, ...] = ()
    """Names of the generators that the program draws from in training, outside of DataLoaders."""
    batch_norms: tuple[str, ...] = ()
    """Classes of the layers that normalized with statistics of their batch."""
    num_placed: Mapping[str, int] = field(default_factory=dict)
    """Number of tensors of the first forward passes and losses, by kind: parameter, buffer, input, target, ..."""
    misplaced: tuple[Misplaced, ...] = ()
    """Those that are not on `device`."""
    backend: str = ""
    """Backend of the process group, also if it was destroyed; "" if there was none."""
    communication: Mapping[str, float] = field(default_factory=dict)
    """What DistributedDataParallel has measured: seconds of an update by name; empty without such a model."""
    num_epochs_set: int = 0
    """Number of calls of `set_epoch` of samplers."""
    has_evaluated: bool = False
    """True if a module was called without gradients."""
    saved: tuple[Saved, ...] = ()
    """Files that `torch.save` wrote."""
    has_left_group: bool = True
    """False if the process ended with a process group that was not destroyed."""


@dataclass(frozen=True)
class RankRecord:
    """What one rank has recorded."""

    folder: Path
    rank: int

    @cached_property
    def updates(self) -> tuple[Update, ...]:
        """All steps of all optimizers, in order."""
        return tuple(Update.from_dict(each) for each in _read_lines(updates_path(self.folder, self.rank)))

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """The parameters of all optimizers by key."""
        lines = _read_lines(parameters_path(self.folder, self.rank))
        return {each["key"]: Parameter(**{**each, "shape": tuple(each["shape"])}) for each in lines}

    @cached_property
    def program(self) -> ProgramFacts:
        """What the program consists of; nothing is known of a rank that ended before its first update."""
        path = program_path(self.folder, self.rank)
        values: dict[str, Any] = {"rank": self.rank, "world_size": 0}
        if path.exists():
            values = json.loads(path.read_text("utf-8"))
        for name in ("samplers", "batch_norms", "draws"):
            values[name] = tuple(values.get(name, ()))
        values["misplaced"] = tuple(Misplaced(**each) for each in values.get("misplaced", ()))
        values["saved"] = tuple(Saved(**each) for each in values.get("saved", ()))
        return ProgramFacts(**values)

    @property
    def has_fault(self) -> bool:
        """True if recording ended with an error, which is in the rank's output."""
        return fault_path(self.folder, self.rank).exists()

    def arrays(self, update: int) -> Mapping[str, numpy.ndarray[Any, Any]]:
        """Return the numbers of a step by key: `<parameter>/gradient`, `/before` and `/after`, as `thin` has left them.

        `update`: position in `updates`.
        """
        with numpy.load(arrays_path(self.folder, self.rank, update)) as file:
            return dict(file)


def updates_path(folder: Path, rank: int) -> Path:
    """Return the path of the file with one line of JSON for each update of `rank`."""
    return folder / f"rank{rank}.updates.jsonl"


def parameters_path(folder: Path, rank: int) -> Path:
    """Return the path of the file with one line of JSON for each parameter of `rank`."""
    return folder / f"rank{rank}.parameters.jsonl"


def program_path(folder: Path, rank: int) -> Path:
    """Return the path of the file with the `ProgramFacts` of `rank`."""
    return folder / f"rank{rank}.program.json"


def fault_path(folder: Path, rank: int) -> Path:
    """Return the path of the file that exists if recording has failed in `rank`."""
    return folder / f"rank{rank}.fault"


def arrays_path(folder: Path, rank: int, update: int) -> Path:
    """Return the path of the file with the numbers of one update of `rank`."""
    return folder / f"rank{rank}.{update}.npz"


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; a rank may have been killed while it wrote the last one."""
    if not path.exists():
        return []
    text = path.read_text("utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
