# SPDX-License-Identifier: Apache-2.0
"""Two numbers per parameter and one per gradient by which ranks are compared without a collective."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from ddpilot.guard.notes import MAX_GRADIENTS, NOT_SEEN
from ddpilot.record.accelerator import HostCopies, HostCopy, can_copy_from, is_capturing

WINDOW = 256
"""Number of elements, from the middle row on, from which the second number of a parameter and the number of a gradient
are computed. For a parameter it is a weighted sum, which differs between tensors with equal norms, such as orthogonal
matrices or tensors with other signs. For a gradient it is the norm: one that was not reduced differs everywhere. If it
is 0 (rows of an embedding), the norm of the whole gradient is used."""

_HASH = np.arange(1, WINDOW + 1, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(1 << 32)
_WEIGHTS = (_HASH / float(1 << 31) - 1.0).astype(np.float32)
LAST_WINDOW = 128
"""Number of elements, from each of two parameters, that are kept before each step."""


def is_plain(tensor: Any) -> TypeGuard[Tensor]:
    """True if `tensor` is a dense local tensor: the norm of a `DTensor` would be a collective."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and tensor.device.type != "meta"
        and tensor.numel() > 0
    )


class Fingerprinter:
    """Computes fingerprints of `parameters` repeatedly, into buffers that it keeps, as allocating memory costs time.

    `always`: indices of parameters whose gradients are always included, besides up to 64 spread over all.
    """

    def __init__(self, parameters: Sequence[Tensor], always: Iterable[int] = ()) -> None:
        self.parameters = tuple(parameters)
        spread = range(0, len(parameters), -(-len(parameters) // MAX_GRADIENTS) or 1)
        self._sampled = {*spread, *always}
        self._buffers: dict[torch.device, Tensor] = {}
        self._views: dict[torch.device, _Views] = {}

    @torch.no_grad()
    def begin(self, copies: HostCopies, *, only_gradients: bool = False) -> PendingFingerprint:
        """Read norms (``p``) and weighted sums (``w``) of parameters, and norms of gradients (``g``; -1: none seen).

        Waits for no device from which `copies` can copy; the result is complete if all tensors are on the CPU. All
        parameters must be `is_plain`. With `only_gradients`, they are not read, and ``p`` and ``w`` are 0.
        """
        pending = PendingFingerprint(len(self.parameters))
        for device, places in self._places().items():
            parameters = [self.parameters[place] for place in places]
            given = self._gradients_on(device, places)
            gradients = list(given.values())
            views = None if only_gradients else self._views_of(device, parameters)
            steep = [_window(gradient) for gradient in gradients]
            pieces = [*([_norms(parameters), *views.windows] if views is not None else ()), *steep]
            part = _Part(views, places, list(given), [window.numel() for window in steep])
            copy = None
            if pieces and can_copy_from(device.type):
                # In full as well, since it is not known yet whether the middle of one is 0.
                whole = [_norms(gradients)] if gradients else []
                copy = copies.begin(torch.cat([piece.float() for piece in (*pieces, *whole)]))
            if copy is not None:
                pending.parts.append((copy, part))
            elif pieces:
                pending.fill(part, self._join(device, pieces), gradients)
        return pending

    def _places(self) -> dict[torch.device, list[int]]:
        """Return the indices of the parameters, by device."""
        places_of: dict[torch.device, list[int]] = {}
        for place, parameter in enumerate(self.parameters):
            places_of.setdefault(parameter.device, []).append(place)
        return places_of

    def _gradients_on(self, device: torch.device, places: Iterable[int]) -> dict[int, Tensor]:
        """Return the sampled gradients on `device` of the parameters at `places`, by index of the parameter."""
        gradients = {place: self.parameters[place].grad for place in places if place in self._sampled}
        return {place: one for place, one in gradients.items() if is_plain(one) and one.device == device}

    def _views_of(self, device: torch.device, parameters: list[Tensor]) -> _Views:
        # Creating views takes as long as reading them, so they are kept while the parameters' addresses do not change.
        addresses = [parameter.data_ptr() for parameter in parameters]
        views = self._views.get(device)
        if views is None or views.addresses != addresses:
            self._views[device] = views = _Views(addresses, parameters)
        for place in views.copied:
            views.windows[place] = _window(parameters[place])
        return views

    def _join(self, device: torch.device, pieces: list[Tensor]) -> Any:
        """Copy all elements of `pieces` to the CPU, concatenated, as writable float32."""
        num = sum(piece.numel() for piece in pieces)
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < num:
            self._buffers[device] = buffer = torch.empty(num, dtype=torch.float32, device=device)
        torch.cat(pieces, out=buffer[:num])
        return buffer[:num].cpu().numpy()


class _Part(NamedTuple):
    """The parameters at `places` and the gradients at `given` of one device; `sizes` of the gradients' windows."""

    views: _Views | None
    """None if only gradients are read."""
    places: list[int]
    given: list[int]
    sizes: list[int]


class PendingFingerprint:
    """A fingerprint of `num` parameters, parts of which may still be in flight from their devices."""

    def __init__(self, num: int) -> None:
        self.parts: list[tuple[HostCopy, _Part]] = []
        """The parts in flight."""
        self._rows = np.zeros((3, num), dtype=np.float32)
        self._rows[2] = NOT_SEEN

    def has_arrived(self) -> bool:
        """True if all of its values have arrived."""
        return all(copy.has_arrived() for copy, _ in self.parts)

    def fingerprint(self) -> dict[str, str]:
        """Return the numbers as the journal holds them: float32 in base64. Call once, when `has_arrived`."""
        for copy, part in self.parts:
            self.fill(part, copy.numbers.numpy())
            copy.release()
        return {key: _pack(row) for key, row in zip("pwg", self._rows, strict=True)}

    def fill(self, part: _Part, numbers: Any, gradients: Sequence[Tensor] | None = None) -> None:
        """Add a part from its `numbers`: norms and windows of parameters, then windows of gradients.

        A gradient whose window is 0 is read in full from `gradients`; if not given, the norms follow in `numbers`.
        """
        views, places, given, sizes = part
        if views is not None:
            begin, middle = len(places), len(places) + len(views.weights)
            values = numbers[begin:middle]
            values *= views.weights
            self._rows[:2, places] = np.stack([numbers[:begin], _sums(values, views.sizes)])
            numbers = numbers[middle:]
        windows, norms = np.split(numbers, [sum(sizes)])
        windows *= windows
        roots = np.sqrt(_sums(windows, sizes))
        if flat := [at for at, root in enumerate(roots) if root == 0]:
            roots[flat] = norms[flat] if gradients is None else _norms([gradients[at] for at in flat]).cpu().numpy()
        self._rows[2, given] = roots


class LastWindows:
    """Copies a few elements of two of `parameters` before every step, by which ranks are compared at the end of a job.

    After its last step a program may change weights, also on one rank only: load the best ones, or an average.
    `places`: indices of the two parameters.
    """

    def __init__(self, parameters: Sequence[Tensor], places: list[int]) -> None:
        self.places = places
        self._parameters = [parameters[place] for place in places]
        self._addresses: list[int] = []
        self._windows: list[Tensor] = []
        self._buffer: Tensor | None = None
        self._copied: Any = None  # an event of their device

    @classmethod
    def of(cls, parameters: Sequence[Tensor]) -> LastWindows | None:
        """Use the middle and the last of the parameters that can be copied in part; returns None if there are none."""
        places = [place for place, one in enumerate(parameters) if _is_readable(one, parameters[-1].device)]
        return cls(parameters, sorted({places[(len(places) - 1) // 2], places[-1]})) if places else None

    def copy(self) -> None:
        """Copy the elements without waiting."""
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if addresses != self._addresses:
            self._addresses = addresses
            self._look_at_parameters()
        if self._buffer is not None:
            torch.cat(self._windows, out=self._buffer)
            if self._copied is not None:
                self._copied.record(torch.accelerator.current_stream(self._buffer.device))

    def _look_at_parameters(self) -> None:
        device = self._parameters[0].device
        self._buffer = None
        if all(_is_readable(parameter, device) for parameter in self._parameters):
            self._windows = [_window(parameter.detach())[:LAST_WINDOW] for parameter in self._parameters]
            size = sum(window.numel() for window in self._windows)
            self._buffer = torch.empty(size, dtype=torch.float32, device=device)
            self._copied = torch.Event(device) if device.type != "cpu" else None

    def taken(self) -> LastCopy | None:
        """Return the last copy, which no longer depends on the parameters; None if there is none."""
        if self._buffer is None:
            return None
        return LastCopy(self.places, [window.numel() for window in self._windows], self._buffer, self._copied)


class LastCopy(NamedTuple):
    """The newest copy of a `LastWindows`: `sizes[i]` elements of the parameter at `places[i]`."""

    places: list[int]
    sizes: list[int]
    buffer: Tensor
    copied: Any

    def fingerprint(self, until_s: float) -> dict[str, str] | None:
        """Return norms, weighted sums and no gradients, as `Fingerprinter.take` does.

        Returns None if the device is busy until `until_s` (on `time.monotonic`), has failed, or captures a graph.
        """
        numbers = self.buffer.numpy().copy() if self.copied is None else self._read_from_device(until_s)
        if numbers is None:
            return None
        norms = np.sqrt(_sums(numbers * numbers, self.sizes))
        sums = _sums(numbers * np.concatenate([_WEIGHTS[:size] for size in self.sizes]), self.sizes)
        none = np.full(len(self.sizes), NOT_SEEN)
        return {key: _pack(row.astype(np.float32)) for key, row in zip("pwg", (norms, sums, none), strict=True)}

    def _read_from_device(self, until_s: float) -> Any:
        if is_capturing():
            return None
        module: Any = torch.get_device_module(self.buffer.device)
        try:
            while not self.copied.query():
                if time.monotonic() > until_s:
                    return None
                time.sleep(0.001)
            # The current stream may be stuck behind a collective that never ends.
            with module.stream(module.Stream(self.buffer.device)):
                return self.buffer.cpu().numpy()
        except RuntimeError:  # an earlier kernel's error, which the program has seen
            return None


class _Views:
    """The windows of `parameters`, whose addresses are `addresses`, and their weights, concatenated."""

    def __init__(self, addresses: list[int], parameters: list[Tensor]) -> None:
        self.addresses = addresses
        self.windows = [_window(parameter) for parameter in parameters]
        self.copied = [place for place, each in enumerate(parameters) if not each.is_contiguous()]
        self.sizes = [window.numel() for window in self.windows]
        self.weights = np.concatenate([_WEIGHTS[:size] for size in self.sizes])


def _is_readable(parameter: Tensor, device: torch.device) -> bool:
    """True if elements can be copied through a view: `parameter` is plain, contiguous and on `device`."""
    is_known = parameter.device == device and (device.type == "cpu" or can_copy_from(device.type))
    return is_known and is_plain(parameter) and parameter.is_contiguous()


def _pack(numbers: Any) -> str:
    return base64.b64encode(numbers.tobytes()).decode()


def _norms(tensors: list[Tensor]) -> Tensor:
    dtypes = {tensor.dtype for tensor in tensors}
    # Squares of half precision overflow.
    if not dtypes.isdisjoint((torch.float16, torch.bfloat16)):
        return torch.stack(torch._foreach_norm(tensors, 2, torch.float32)).float()
    norms = torch._foreach_norm(tensors, 2)
    return torch.stack([norm.float() for norm in norms] if len(dtypes) > 1 else norms).float()


def _window(tensor: Tensor) -> Tensor:
    """Return up to `WINDOW` elements of `tensor` from its middle row on; all elements of a small one.

    A view if they are contiguous, otherwise a copy.
    """
    num = tensor.numel()
    if num <= WINDOW:
        return tensor.reshape(-1)
    num_rows = len(tensor)
    row_size = num // num_rows
    start = num_rows // 2 * row_size
    size = min(WINDOW, num - start)
    if tensor.is_contiguous():
        return tensor.as_strided((size,), (1,), tensor.storage_offset() + start)
    return tensor.narrow(0, num_rows // 2, -(-size // row_size)).reshape(-1)[:size]


def _sums(numbers: Any, sizes: list[int]) -> Any:
    """Return the sum of each run of `sizes` elements of `numbers`."""
    if len(set(sizes)) == 1:  # most tensors have more elements than a window: much faster
        return numbers.reshape(len(sizes), sizes[0]).sum(axis=1, dtype=np.float64)
    sums = np.zeros(len(sizes))
    starts: Any = np.cumsum(sizes) - sizes
    # For an empty run, `reduceat` would return the first element of the next one.
    filled = [at for at, size in enumerate(sizes) if size]
    if filled:
        sums[filled] = np.add.reduceat(numbers, starts[filled], dtype=np.float64)
    return sums
