# SPDX-License-Identifier: Apache-2.0
"""Override in a rank what its script passes to DDP and to DataLoaders, and end the script after some updates.

Imports torch only where `TRIAL_VARIABLE` is set.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ddpilot.guard.probe import keep_dynamo_out
from ddpilot.record.call_sites import SiteFinder, describe_site
from ddpilot.record.hook import RankStart
from ddpilot.user_files import CodeLine

TRIAL_VARIABLE = "DDPILOT_TRIAL"
"""Environment variable with the folder of the `Trial` that a rank belongs to."""
_TRIAL, _CALLS = "trial.json", "calls.jsonl"
_OF_DDP = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
_OF_LOADER = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
_COMPRESSIONS = {"bf16": "bf16_compress_hook", "fp16": "fp16_compress_hook"}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The options that a run of a script overrides. By default none."""

    num_updates: int = 0
    """Updates after which the script ends; 0: it runs to its end."""
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of DistributedDataParallel."""
    loader: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the DataLoaders that `loader_lines` create."""
    loader_lines: Sequence[tuple[str, int]] = ()
    num_threads: int | None = None
    """Threads of each rank, whatever the script sets; None: as the script has them."""
    compression: str = ""
    """"bf16" or "fp16": the type in which gradients are exchanged."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks; the caller sets them."""

    def write(self, folder: Path) -> None:
        """Write the trial for the ranks that have `folder` in `TRIAL_VARIABLE`."""
        (folder / _TRIAL).write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def read(cls, folder: Path) -> Trial:
        """Return what `write` has written into `folder`."""
        values = json.loads((folder / _TRIAL).read_text("utf-8"))
        return cls(**{**values, "loader_lines": tuple((file, line) for file, line in values["loader_lines"])})


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call that a trial may change: of DistributedDataParallel, DataLoader or torch.set_num_threads."""

    kind: str
    """"ddp", "loader" or "threads"."""
    line: CodeLine
    """The user's line; without a file if there is none."""
    values: Mapping[str, Any]
    """The values in effect afterwards."""
    num_passes: int = 0
    """How often a DataLoader was iterated with gradients enabled."""


def read_calls(folder: Path) -> list[Call]:
    """Return the calls of rank 0 in the run whose trial was in `folder`, in order."""
    path = folder / _CALLS
    notes = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    passes: dict[int, int] = {}
    for note in notes:
        if "pass_of" in note:
            passes[note["pass_of"]] = passes.get(note["pass_of"], 0) + 1
    return [
        Call(
            kind=note["kind"],
            line=CodeLine(**note["line"]),
            values=note["values"],
            num_passes=passes.get(note["number"], 0),
        )
        for note in notes
        if "kind" in note
    ]


def start(rank_start: RankStart) -> None:
    """Apply the trial of `TRIAL_VARIABLE` in this rank. Nothing is undone: the process ends with the trial."""
    folder = rank_start.environ.get(TRIAL_VARIABLE)
    if folder:
        notes = Path(folder) / _CALLS if rank_start.rank == 0 else None
        _Overrides(Trial.read(Path(folder)), notes).install()


class TrialEnded(SystemExit):
    """Ends the script on this rank: it has made the updates that were asked for."""

    def __init__(self) -> None:
        super().__init__(0)


class _Overrides:
    """Replaces functions of torch in this process. `notes`: the file for calls, None to write none."""

    def __init__(self, trial: Trial, notes: Path | None) -> None:
        import torch

        self._trial = trial
        self._notes = notes
        self._pid = os.getpid()
        self._finder = SiteFinder(torch=os.path.dirname(torch.__file__))
        self._num_calls = self._num_updates = 0
        self._has_stepped = False
        self._loaders: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def install(self) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from torch.utils.data import DataLoader

        _replace(DistributedDataParallel, "__init__", self._init_ddp)
        _replace(DataLoader, "__init__", self._init_loader)
        _replace(DataLoader, "__iter__", self._iterate_loader)
        _replace(torch, "set_num_threads", self._set_num_threads)
        if self._trial.num_updates:
            register_optimizer_step_post_hook(self._note_step)
            _replace(torch.autograd, "backward", self._backward)

    # What is replaced: each takes the original function, then its arguments

    def _init_ddp(self, original: Callable[..., Any], ddp: Any, *args: Any, **kwargs: Any) -> None:
        line = self._find_line()
        args, kwargs = _override(original, (ddp, *args), kwargs, self._trial.ddp)
        original(*args, **kwargs)
        if self._trial.compression:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            ddp.register_comm_hook(None, getattr(default_hooks, _COMPRESSIONS[self._trial.compression]))
        values = {name: getattr(ddp, name) for name in _OF_DDP}
        values["bucket_cap_mb"] = ddp.bucket_bytes_cap / 2**20
        self._note_call("ddp", line, values | {"has_small_first_bucket": bool(ddp.bucket_bytes_cap_default)})

    def _init_loader(self, original: Callable[..., Any], loader: Any, *args: Any, **kwargs: Any) -> None:
        from torch.utils.data import IterableDataset

        line = self._find_line()
        is_changed = line is not None and (line.file, line.line) in self._trial.loader_lines
        args, kwargs = _override(original, (loader, *args), kwargs, self._trial.loader if is_changed else {})
        original(*args, **kwargs)
        values = {name: getattr(loader, name) for name in _OF_LOADER}
        values["is_iterable"] = isinstance(loader.dataset, IterableDataset)
        values["is_of_loop"] = type(loader.dataset).__module__.partition(".")[0] == "ddpilot"
        self._loaders[loader] = self._note_call("loader", line, values)

    def _iterate_loader(self, original: Callable[..., Any], loader: Any) -> Any:
        import torch

        if torch.is_grad_enabled() and loader in self._loaders:
            self._write({"pass_of": self._loaders[loader]})
        return original(loader)

    def _set_num_threads(self, original: Callable[..., Any], num_threads: int) -> None:
        original(self._trial.num_threads or num_threads)
        self._note_call("threads", self._find_line(), {"num_threads": num_threads})

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._has_stepped:
            self._has_stepped = False
            self._num_updates += 1
            if self._num_updates >= self._trial.num_updates:
                raise TrialEnded  # on all ranks before the same backward pass
        return original(*args, **kwargs)

    def _note_step(self, *_: Any) -> None:
        self._has_stepped = True

    # Notes

    def _find_line(self) -> CodeLine | None:
        """Return the line that called what is replaced: outside of this frame, the replacement and the wrapper."""
        fact = describe_site(self._finder.walk(sys._getframe(3)))
        return CodeLine(fact["file"], fact["line"], fact["function"], fact.get("text", "")) if "file" in fact else None

    def _note_call(self, kind: str, line: CodeLine | None, values: Mapping[str, Any]) -> int:
        self._num_calls += 1
        place = asdict(line or CodeLine("", 0))
        self._write({"kind": kind, "number": self._num_calls, "line": place, "values": values})
        return self._num_calls

    def _write(self, note: Mapping[str, Any]) -> None:
        if self._notes is not None and os.getpid() == self._pid:
            with self._notes.open("a", encoding="utf-8") as file:
                file.write(json.dumps(note) + "\n")


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace `owner.name` by `function`, which is given what it replaces and the arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    keep_dynamo_out(wrapper)
    setattr(owner, name, wrapper)


def _override(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], changes: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call of `function` with `changes`, also of those that are given by position."""
    if not changes:
        return args, kwargs
    names = list(inspect.signature(function).parameters)
    place = {name: names.index(name) for name in changes}
    changed = list(args)
    for name in changes:
        if place[name] < len(changed):
            changed[place[name]] = changes[name]
    named = {name: value for name, value in changes.items() if place[name] >= len(changed)}
    return tuple(changed), {**kwargs, **named}
