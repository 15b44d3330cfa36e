# SPDX-License-Identifier: Apache-2.0
"""Note for errors about tensors on several devices which tensor was where, by name, while the stack holds them."""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from collections import ChainMap
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch

from ddpilot.guard.notes import DevicesNote, Site
from ddpilot.guard.probe import Notes
from ddpilot.guard.probes.caller_source import resolve
from ddpilot.guard.probes.tensors import tensors_in

_MESSAGE = re.compile(
    r"same device|expected device|on different devices|should be (on )?the same( device)?\b.*(cpu|cuda)", re.I
)
_MAX_NOTED = 4
_MAX_NAMES = 200
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


class DeviceErrorProbe:
    """Observes exceptions when they are formatted at the end of a program; does not change them."""

    name = "errors about devices"

    def install(self, notes: Notes) -> list[Callable[[], None]]:
        seen: list[int] = []

        def formats(_: Any, kind: Any, error: Any, frames: TracebackType | None, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001
            if not isinstance(error, RuntimeError) or frames is None or id(error) in seen or len(seen) >= _MAX_NOTED:
                return
            if not _MESSAGE.search(str(error)):
                return
            seen.append(id(error))
            _note(notes, error, frames)

        undo = notes.around(traceback.TracebackException, "__init__", before=formats)
        theirs = sys.excepthook
        watched = notes.safely(formats)

        def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
            watched(None, kind, error, frames)
            theirs(kind, error, frames)

        sys.excepthook = hook

        def restore() -> None:
            if sys.excepthook is hook:
                sys.excepthook = theirs

        return [undo, restore]


def _note(notes: Notes, error: RuntimeError, frames: TracebackType) -> None:
    found: tuple[FrameType, int] | None = None
    place: Site = {}
    for frame, line in traceback.walk_tb(frames):
        site = notes.site(frame)
        # The innermost frame of the user's own code: the site of a library's frame is its caller's.
        if site and site["file"] and site["function"] == frame.f_code.co_name and _is_file(site["file"], frame):
            found = (frame, line)
            text = linecache.getline(frame.f_code.co_filename, line).strip()[:200]
            place = {**site, "line": line, "text": text}
    if found is None:
        return
    by_device = _names_by_device(found[0], place["text"])
    if len(by_device) > 1:
        message = str(error).strip().splitlines()[0][:300]
        message = f"{type(error).__name__}: {message}"
        notes.write("devices", DevicesNote(by_device=by_device, message=message, site=place))


def _is_file(file: str, frame: FrameType) -> bool:
    return file == frame.f_code.co_filename or not file.startswith(("/", "<"))


def _names_by_device(frame: FrameType, text: str) -> dict[str, list[str]]:
    """Tensors and modules named on the line, by device; modules are represented by their parameters and buffers."""
    found: dict[str, list[str]] = {}
    for name, value in dict(_find(frame, path) for path in _NAME.findall(text)).items():
        is_module = isinstance(value, torch.nn.Module)
        if is_module:
            tensors = [*value.named_parameters(), *value.named_buffers()]
        else:
            tensors = list(tensors_in(value)) if not callable(value) or isinstance(value, torch.Tensor) else []
        by_device: dict[str, list[str]] = {}
        for inner, tensor in tensors[:_MAX_NAMES]:
            by_device.setdefault(str(tensor.device), []).append(f"{name}.{inner}" if inner else name)
        for device, names in by_device.items():
            whole = [f"{name} ({len(names)} tensor{'s' * (len(names) > 1)})"]
            found.setdefault(device, []).extend(whole if is_module and len(by_device) == 1 else names[:20])
    return found


def _find(frame: FrameType, path: str) -> tuple[str, Any]:
    """Return `path` and its value; for a method of a tensor, such as ``output.softmax``, the tensor."""
    names = ChainMap(frame.f_locals, frame.f_globals)
    value = resolve(names, path)
    owner = path.rpartition(".")[0]
    if value is None and isinstance(tensor := resolve(names, owner), torch.Tensor):
        return owner, tensor
    return path, value
