# SPDX-License-Identifier: Apache-2.0
"""Observe DDP models: construction, inputs during training, and random draws."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ddpilot.guard.notes import (
    MIN_NORM_SAMPLES,
    BatchKey,
    DdpModelNote,
    InputNote,
    NormsNote,
    RandomNote,
    Site,
    TrainsNote,
)
from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.data.loaders import pointers_of
from ddpilot.guard.probes.data.position import Position, TrainedModel, is_due
from ddpilot.guard.probes.data.random_draws import device_digest, words_between
from ddpilot.guard.probes.tensors import fingerprint, num_rows_of
from ddpilot.record.accelerator import can_copy_from, is_capturing

_NUM_NORM_STEPS = 3
_PREPARING = os.path.join("ddpilot", "training", "")


class ForwardObserver:
    """The part of the data probe that observes DDP models."""

    def __init__(self, notes: Notes, position: Position) -> None:
        self._notes = notes
        self._position = position
        self._num_models = 0

    def install(self) -> list[Callable[[], None]]:
        around = self._notes.around
        return [
            around(DistributedDataParallel, "__init__", returned=self._made),
            around(DistributedDataParallel, "forward", before=self._begins, returned=self._over),
        ]

    def _made(self, _: Any, __: Any, model: Any, *___: Any, **____: Any) -> None:
        self._num_models += 1
        position = self._position
        position.fetched.clear()  # batches read before this model existed did not train it
        position.models = {key: known for key, known in position.models.items() if known.find() is not None}
        is_prepared = _is_prepared(sys._getframe())
        position.models[id(model)] = TrainedModel(model, number=self._num_models, is_prepared=is_prepared)
        self._notes.write("ddp_model", _describe_model(model, self._num_models, self._notes.site()))

    def _begins(self, model: Any, *inputs: Any, **kwargs: Any) -> tuple[Any, ...] | None:
        position = self._position
        known = position.models.get(id(model))
        if known is None or known.find() is not model or not torch.is_grad_enabled():
            return None
        # Same as `model.module`, at a fraction of the cost of nn.Module's attribute access.
        if not (model.training and model._modules["module"].training):
            return None
        known.forwards += 1
        number, forward = known.number, known.forwards
        position.evaluated = None
        if position.fetched:
            self._note_training(model, number)
        if position.batches:
            position.used = position.find_batch(pointers_of((inputs, kwargs)))
        if forward <= _NUM_NORM_STEPS and not known.is_prepared:
            self._note_norms(model, known, (inputs, kwargs))
        if not is_due(forward) or is_capturing():
            return None
        self._note_input(number, forward, (inputs, kwargs))
        drawn = self._count_drawn(known, forward)
        return number, forward, drawn, *device_digest(_device_of(model.module))

    def _over(self, begun: tuple[Any, ...] | None, result: Any, model: Any, *_: Any, **__: Any) -> None:
        if begun is None:
            return
        number, forward, drawn, library, before = begun
        after = device_digest(_device_of(model.module))[1]
        seen = fingerprint(result)
        if (known := self._position.models.get(id(model))) is not None:
            known.ended, known.used = (forward, torch.get_rng_state()), self._position.used
        note = RandomNote(
            model=number,
            forward=forward,
            library=library,
            before=before,
            after=after,
            drawn=drawn,
            output=seen.checksum if seen else None,
            site=self._notes.site(),
        )
        self._notes.write("random", note)

    def _count_drawn(self, known: TrainedModel, forward: int) -> int:
        """Lower bound on the words drawn on the CPU for a new batch since the previous forward."""
        used, (last, state) = self._position.used, known.ended
        if used is None or used is known.used or last != forward - 1 or not last:
            return 0
        return words_between(state, torch.get_rng_state())

    def _note_training(self, model: Any, number: int) -> None:
        fetched = self._position.fetched
        for found in fetched.values():
            if number not in found.trained:
                found.trained.add(number)
                join = bool(getattr(getattr(model, "_join_config", None), "enable", False))
                self._notes.write("trains", TrainsNote(**found.key, model=number, join=join))
        fetched.clear()

    def _note_input(self, number: int, forward: int, data: Any) -> None:
        seen = fingerprint(data)
        if seen is None:
            return
        used = self._position.used
        key: BatchKey = used.key if used is not None else {}
        note = InputNote(
            model=number,
            forward=forward,
            checksum=seen.checksum,
            elements=seen.num_elements,
            site=self._notes.site(),
            **key,
        )
        self._notes.write("input", note)

    def _note_norms(self, model: Any, known: TrainedModel, data: Any) -> None:
        rows = num_rows_of(data)
        known.rows += [] if rows is None else [rows]
        if len(known.rows) < _NUM_NORM_STEPS or max(known.rows) >= MIN_NORM_SAMPLES:
            return
        layers = [name for name, layer in model.module.named_modules() if _is_small_scale(layer)]
        if layers and dist.get_world_size(model.process_group) > 1:
            note = NormsNote(model=known.number, layers=layers[:20], rows=known.rows, site=self._notes.site())
            self._notes.write("norms", note)


def _is_prepared(frame: FrameType | None) -> bool:
    """True if called from `Loop.prepare`."""
    while frame is not None:
        if _PREPARING in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _is_small_scale(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm) and layer.training


def _device_of(module: nn.Module) -> torch.device:
    """Device of the first parameter; CPU if it has none, such as a module that lends them out temporarily."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _describe_model(model: Any, number: int, site: Site) -> DdpModelNote:
    ranks = dist.get_process_group_ranks(model.process_group)
    device = _device_of(model.module)
    uuid, num_devices = "", 0
    if can_copy_from(device.type):
        module: Any = torch.get_device_module(device)
        find_properties = getattr(module, "get_device_properties", lambda _: None)
        uuid = str(getattr(find_properties(device), "uuid", ""))
        num_devices = torch.accelerator.device_count()
    return DdpModelNote(
        model=number,
        ranks=None if len(ranks) == dist.get_world_size() else ranks,
        device=str(device),
        host=socket.gethostname(),
        uuid=uuid,
        num_devices=num_devices,
        site=site,
    )
