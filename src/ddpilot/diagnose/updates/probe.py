# SPDX-License-Identifier: Apache-2.0
"""Record the steps of all optimizers of a rank, with gradients, parameters, losses, batches and random states."""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DistributedSampler
from torch.utils.data import dataloader as torch_loader

from ddpilot.data.local_batch import LocalBatch, observers
from ddpilot.data.workers import PieceReader
from ddpilot.diagnose.updates.placements import ModuleObserver
from ddpilot.diagnose.updates.record import (
    SPEC_VARIABLE,
    Batch,
    Parameter,
    ProgramFacts,
    RecordSpec,
    Saved,
    Update,
    arrays_path,
    fault_path,
    parameters_path,
    program_path,
    updates_path,
)
from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.parameters.parameter_names import find_parameter_names
from ddpilot.guard.probes.parameters.steps import is_nested_step
from ddpilot.guard.probes.tensors import fingerprint_rows, num_rows_of

_READS_AHEAD = os.path.join("accelerate", "data_loader.py")
"""File of loaders that read one batch ahead of the training."""
_OF_LOOP = -1
"""Number of the loader of batches that a `Loop` reads."""


class BatchObserver:
    """The part of the probe that sees batches. `read`: called when one has been read, before it is used."""

    def __init__(self, read: Callable[[], None]) -> None:
        self._read = read
        self.samplers: list[str] = []
        """Class name of the sampler of each DataLoader."""
        self._batches: list[Batch] = []
        self._loaders: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._requested: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
        self._waiting: WeakKeyDictionary[Any, Batch] = WeakKeyDictionary()

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        """Start observing; returns the functions that stop it."""
        kind = torch_loader._BaseDataLoaderIter
        observer = notes.safely(self._loop_batch_read)
        observers.append(observer)
        return [
            notes.around(kind, "_next_index", returned=self._index_requested),
            notes.around(kind, "__next__", returned=self._batch_returned, raised=self._loader_ended),
            lambda: observers.remove(observer),
        ]

    def take(self) -> tuple[Batch, ...]:
        """Return the batches since the last call."""
        batches, self._batches = self._batches, []
        return tuple(batches)

    def _loop_batch_read(self, batch: LocalBatch, *_: int) -> None:
        self._read()
        if torch.is_grad_enabled() and batch.count:
            indices = tuple(map(int, batch.sample_ids)) if (batch.sample_ids >= 0).all() else ()
            checksums = _checksums_of(batch.data, batch.count)
            self._batches.append(Batch(loader=_OF_LOOP, indices=indices, checksums=checksums))

    def _index_requested(self, _: None, index: Any, iterator: Any) -> None:
        self._requested.setdefault(iterator, []).append(index)

    def _batch_returned(self, _: None, data: Any, iterator: Any) -> None:
        self._read()
        requested = self._requested.get(iterator)
        index = requested.pop(0) if requested else None
        if not torch.is_grad_enabled() or isinstance(iterator._dataset, PieceReader):  # the latter is of a `Loop`
            return
        # An iterator is not told its loader, but they share the dataset's batch sampler.
        sampler = iterator._index_sampler
        number = self._loaders.get(sampler)
        if number is None:
            number = self._loaders[sampler] = len(self._loaders)
            self.samplers.append(type(getattr(sampler, "sampler", sampler)).__name__)
        indices = tuple(index) if isinstance(index, list | tuple) and all(type(one) is int for one in index) else ()
        batch = Batch(loader=number, indices=indices, checksums=_checksums_of(data, num_rows_of(data) or 0))
        if _is_ahead():
            self._use_waiting(iterator)
            self._waiting[iterator] = batch
        else:
            self._batches.append(batch)

    def _loader_ended(self, _: None, iterator: Any) -> None:
        self._use_waiting(iterator)

    def _use_waiting(self, iterator: Any) -> None:
        """Count the batch that a library has kept back while it read the next one."""
        if (batch := self._waiting.pop(iterator, None)) is not None:
            self._batches.append(batch)


def _checksums_of(data: Any, num_rows: int) -> tuple[int, ...]:
    rows = fingerprint_rows(data, num_rows, list(range(num_rows)))
    return tuple(rows[row] for row in sorted(rows))


def _is_ahead() -> bool:
    """True if a library reads the batch, which passes on the one before it."""
    frame = sys._getframe(2)
    for _ in range(4):
        if frame.f_code.co_name == "__iter__" and frame.f_code.co_filename.endswith(_READS_AHEAD):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


_MAX_ELEMENTS = 4096
_MAX_SAVED = 100
_TIMES = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)
"""Of DDP's logging data."""
_MAX_STEPS_PER_UPDATE = 10
"""Steps of one optimizer for each update of a slower one, after which recording ends without it."""


class UpdatesRecorded(SystemExit):
    """Ends the program on this rank: everything that was asked for is recorded."""

    def __init__(self) -> None:
        super().__init__(0)


class UpdateProbe:
    """Observes optimizers, backward passes and DataLoaders; ends the program after the updates that are wanted."""

    name = "updates"

    def __init__(self) -> None:
        self._folder = Path(os.environ[SPEC_VARIABLE])
        self._spec = RecordSpec.read(self._folder)
        self._rank = int(os.environ.get("RANK", "0"))
        self._optimizers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._num_steps: list[int] = []
        self._num_open = 0
        self._num_recorded = 0
        self._losses: list[float] = []
        self._batches = BatchObserver(self._begin_draws)
        self._ddp_models: WeakSet[Any] = WeakSet()
        self._sums: dict[int, list[torch.Tensor]] = {}
        self._num_turns: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._has_scaler = False
        self._generators: Mapping[str, int] = {}
        self._draws: dict[str, None] = {}
        self._since_s = 0.0
        self._began_s = self._recording_s = 0.0
        self._times: list[dict[str, float]] = []
        self._num_epochs_set = 0
        self._backend, self._world_size = "", int(os.environ.get("WORLD_SIZE", "1"))
        self._saved: list[Saved] = []
        self._site: Mapping[str, Any] = {}
        self._arrays: dict[str, numpy.ndarray[Any, Any]] = {}
        self._modules = ModuleObserver(self._write_program)

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        self._notes = notes
        return [
            register_optimizer_step_pre_hook(notes.safely(self._before_step)).remove,
            register_optimizer_step_post_hook(notes.safely(self._after_step)).remove,
            notes.around(torch.autograd, "backward", before=self._before_backward),
            notes.around(DistributedDataParallel, "__init__", returned=self._wrapped),
            notes.around(torch.amp.GradScaler, "scale", before=self._before_scale),
            *self._batches.install(notes),
            notes.around(DistributedSampler, "set_epoch", before=self._epoch_set),
            notes.around(torch, "save", returned=self._file_saved, aliases=(torch.serialization,)),
            *self._modules.install(notes),
            notes.safely(self._write_program),
            self._write_fault,
        ]

    def _wrapped(self, _: None, __: None, ddp: Any, *_args: Any, **_kwargs: Any) -> None:
        self._ddp_models.add(ddp)

    def _before_scale(self, scaler: Any, *_: Any) -> None:
        self._has_scaler |= bool(scaler.is_enabled())

    def _before_backward(self, tensors: Any, *_args: Any, **_kwargs: Any) -> None:
        self._modules.expects_inputs = True
        self._find_draws()
        for tensor in (tensors,) if isinstance(tensors, torch.Tensor) else tensors:
            if tensor.numel() == 1 and tensor.is_floating_point():
                self._losses.append(tensor.item())

    def _begin_draws(self) -> None:
        self._generators = _read_generators()

    def _find_draws(self) -> None:
        """Note which generators have changed since the last batch or step."""
        before, self._generators = self._generators, _read_generators()
        self._draws |= {name: None for name, state in before.items() if self._generators.get(name, state) != state}

    def _epoch_set(self, *_: Any, **__: Any) -> None:
        self._num_epochs_set += 1

    def _file_saved(self, _: None, __: None, content: Any, *args: Any, **kwargs: Any) -> None:
        target = args[0] if args else kwargs.get("f")
        if isinstance(target, str | os.PathLike) and len(self._saved) < _MAX_SAVED:
            path = os.path.realpath(os.fsdecode(target))
            self._saved.append(Saved(path=path, site=self._notes.site(), has_prefix=_has_prefix(content)))

    # Steps

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Record parameters and gradients; if a closure computes gradients, return arguments that record in it."""
        is_nested = self._num_open > 0 and is_nested_step()  # an open step may have ended with an error
        self._num_open = self._num_open + 1 if is_nested else 1
        if is_nested:
            return None
        self._began_s = time.perf_counter()
        self._site = self._notes.site()
        if optimizer not in self._optimizers:
            self._add_optimizer(optimizer)
        number = self._optimizers[optimizer]
        for place, parameter in enumerate(_parameters_of(optimizer)):
            self._arrays[f"{number}/{place}/before"] = thin(parameter)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._use_gradients(optimizer)
            return None

        def recorded(*arguments: Any, **more: Any) -> Any:
            loss = closure(*arguments, **more)
            self._notes.safely(self._use_gradients)(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": recorded}

    def _use_gradients(self, optimizer: Optimizer) -> None:
        if not self._arrays or (self._spec.takes_turns and not self._collect(optimizer)):
            self._arrays = {}
            return
        number = self._optimizers[optimizer]
        for place, parameter in enumerate(_parameters_of(optimizer)):
            if parameter.grad is not None:
                self._arrays.setdefault(f"{number}/{place}/gradient", thin(parameter.grad))
        if self._spec.perturbs:
            _perturb(optimizer, number * 1_000_003 + self._num_steps[number])
        self._recording_s = time.perf_counter() - self._began_s

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._num_open = max(0, self._num_open - 1)
        if self._num_open or not self._arrays:
            return
        now_s = time.perf_counter()
        number = self._optimizers[optimizer]
        for place, parameter in enumerate(_parameters_of(optimizer)):
            self._arrays[f"{number}/{place}/after"] = thin(parameter)
        self._find_draws()
        update = Update(
            optimizer=number,
            number=self._num_steps[number],
            site=self._site,
            losses=tuple(self._losses),
            batches=self._batches.take(),
            inputs=tuple(self._modules.inputs),
            num_rows=self._modules.num_rows,
            options=tuple(_numbers_of(group) for group in optimizer.param_groups),
            generators=self._generators,
            duration_s=now_s - self._since_s - self._recording_s if self._since_s else 0.0,
        )
        self._write_update(update)
        self._losses, self._arrays, self._since_s = [], {}, time.perf_counter()
        self._modules.inputs, self._modules.num_rows = [], 0
        self._num_steps[number] += 1
        self._modules.end_first_update()
        self._times.append(_read_times(self._ddp_models))
        self._write_program()
        if self._is_enough():
            raise UpdatesRecorded

    def _is_enough(self) -> bool:
        wanted = self._spec.num_updates
        if wanted is None:
            return False
        return min(self._num_steps) >= wanted or max(self._num_steps) >= wanted * _MAX_STEPS_PER_UPDATE

    def _collect(self, optimizer: Optimizer) -> bool:
        """Keep the gradients of one rank's turn; after the last turn leave their mean, and return True."""
        parameters = _parameters_of(optimizer)
        num_turns = self._num_turns[optimizer] = self._num_turns.get(optimizer, 0) + 1
        for parameter in parameters:
            if parameter.grad is not None:
                self._sums.setdefault(id(parameter), []).append(parameter.grad.detach().clone())
        if num_turns % self._spec.replicas:
            for parameter in parameters:
                parameter.grad = None  # so that the step leaves it as it is
            return False
        for parameter in parameters:
            if kept := self._sums.pop(id(parameter), None):
                parameter.grad = torch.stack(kept).sum(0) / self._spec.replicas
        return True

    # Files

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        number = self._optimizers[optimizer] = len(self._num_steps)
        self._num_steps.append(0)
        names = find_parameter_names(optimizer, self._notes.user_frame())
        reduced = {id(each): name for ddp in self._ddp_models for name, each in ddp.module.named_parameters()}
        with open(parameters_path(self._folder, self._rank), "a", encoding="utf-8") as file:
            for place, parameter in enumerate(_parameters_of(optimizer)):
                described = Parameter(
                    key=f"{number}/{place}",
                    name=_without_wrapper(
                        names.get(id(parameter)) or reduced.get(id(parameter)) or f"parameter {place}"
                    ),
                    shape=tuple(parameter.shape),
                    device=str(parameter.device),
                    in_ddp=id(parameter) in reduced,
                )
                file.write(json.dumps(asdict(described)) + "\n")

    def _write_update(self, update: Update) -> None:
        numpy.savez(arrays_path(self._folder, self._rank, self._num_recorded), **self._arrays)  # type: ignore[arg-type]
        with open(updates_path(self._folder, self._rank), "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(update)) + "\n")
        self._num_recorded += 1

    def _write_fault(self) -> None:
        if self._notes.is_off:
            fault_path(self._folder, self._rank).touch()

    def _write_program(self) -> None:
        if dist.is_initialized():
            self._backend, self._world_size = str(dist.get_backend_config()), dist.get_world_size()
        placements = self._modules.placements
        program = ProgramFacts(
            rank=self._rank,
            world_size=self._world_size,
            device=placements.device,
            samplers=tuple(self._batches.samplers),
            num_dropped_out=self._modules.num_dropped_out,
            has_scaler=self._has_scaler,
            draws=tuple(self._draws),
            batch_norms=tuple(self._modules.batch_norms),
            num_placed=dict(placements.num_seen),
            misplaced=tuple(placements.misplaced.values()),
            backend=self._backend,
            communication=_summarize(self._times[2:] or self._times),
            num_epochs_set=self._num_epochs_set,
            has_evaluated=self._modules.has_evaluated,
            saved=tuple(self._saved),
            has_left_group=not dist.is_initialized(),
        )
        path = program_path(self._folder, self._rank)
        begun = path.with_suffix(".begun")
        begun.write_text(json.dumps(asdict(program)), "utf-8")
        begun.replace(path)  # a rank that is killed while it writes leaves no part of a file


def thin(tensor: torch.Tensor) -> numpy.ndarray[Any, Any]:
    """Return the elements of `tensor` in float64, at most 4096 of them evenly spaced, then its sum and its norm."""
    full = tensor.detach()
    if hasattr(full, "full_tensor"):  # sharded; collective
        full = full.full_tensor()
    if full.layout is not torch.strided:
        full = full.to_dense()
    if full.is_complex():
        full = torch.view_as_real(full)
    flat = full.reshape(-1).to(torch.float64)
    step = max(1, -(-flat.numel() // _MAX_ELEMENTS))
    found = torch.cat([flat[::step], flat.sum().reshape(1), flat.norm().reshape(1)])
    return numpy.asarray(found.cpu().numpy())


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _numbers_of(group: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in group.items() if type(value) in (int, float)}


def _without_wrapper(name: str) -> str:
    """Return `name` without the attributes by which wrappers refer to the model inside them."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod", "_forward_module"))


def _perturb(optimizer: Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in _parameters_of(optimizer):
        gradient = parameter.grad
        if gradient is not None and gradient.is_floating_point() and gradient.layout is torch.strided:
            noise = torch.randn(gradient.shape, generator=generator, dtype=torch.float32).to(gradient)
            size = gradient.norm() / max(1, gradient.numel()) ** 0.5
            gradient.add_(noise * size * torch.finfo(gradient.dtype).eps)


def _read_generators() -> dict[str, int]:
    found = {"torch": zlib.crc32(torch.get_rng_state().numpy().tobytes())}
    if "numpy.random" in sys.modules:
        found["numpy"] = zlib.crc32(numpy.random.get_state()[1].tobytes())  # type: ignore[index]
    found["random"] = zlib.crc32(repr(random.getstate()).encode())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = zlib.crc32(torch.cuda.get_rng_state().numpy().tobytes())
    return found


def _read_times(models: WeakSet[Any]) -> dict[str, float]:
    """Seconds of the update before this one, in the longest of all models, as DDP's logger has measured them."""
    found: dict[str, float] = {}
    for ddp in models:
        try:
            data = ddp._get_ddp_logging_data()
        except RuntimeError:  # no update yet
            continue
        for name in _TIMES:
            if seconds := float(data.get(name, 0)) / 1e9:
                found[name] = max(found.get(name, 0.0), seconds)
    return found


def _summarize(times: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each time, of the updates in which it was measured."""
    by_name = {name: [each[name] for each in times if name in each] for name in _TIMES}
    return {name: statistics.median(values) for name, values in by_name.items() if values}


def _has_prefix(content: Any) -> bool:
    """Return True if `content`, or a mapping in it, is the state of a DDP wrapper."""
    if not isinstance(content, Mapping):
        return False
    tensors = [str(name) for name, value in content.items() if isinstance(value, torch.Tensor)]
    if tensors:
        return all(name.startswith("module.") for name in tensors)
    return any(_has_prefix(each) for each in content.values())
