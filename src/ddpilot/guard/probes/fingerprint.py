# SPDX-License-Identifier: Apache-2.0
"""Two numbers for each parameter and one for its gradient, by which ranks can be told apart without a collective."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

WINDOW = 256
"""Elements from the middle row on of each parameter and gradient that its second number is made of. Of a parameter, a
weighted sum: what has the same norm, an orthogonal matrix or one with other signs, differs there. Of a gradient, the
norm: one that was not reduced differs everywhere, and where it is 0 (rows of an embedding) all of it is taken."""

_HASH = np.arange(1, WINDOW + 1, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(1 << 32)
_WEIGHTS = (_HASH / float(1 << 31) - 1.0).astype(np.float32)
NO_GRADIENT = -1.0
MAX_GRADIENTS = 64
_CUDA: Any = torch.cuda
LAST_WINDOW = 128
"""Elements of each of two parameters that are kept of the last step."""


def is_plain(tensor: Any) -> bool:
    """Whether `tensor` holds its numbers here and densely: of a `DTensor`, asking for a norm is a collective."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and tensor.device.type != "meta"
        and tensor.numel() > 0
    )


def is_capturing() -> bool:
    """Whether what runs now becomes part of a CUDA graph: nothing may be waited for then."""
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


class Fingerprinter:
    """Takes fingerprints of `parameters`, again and again, into memory that it keeps: fresh memory costs time.

    `always`: places of parameters whose gradients are looked at each time, besides up to 64 spread over all.
    """

    def __init__(self, parameters: Sequence[Tensor], always: Iterable[int] = ()) -> None:
        self.parameters = tuple(parameters)
        spread = range(0, len(parameters), -(-len(parameters) // MAX_GRADIENTS) or 1)
        self._sampled = sorted({*spread, *always})
        self._buffers: dict[torch.device, Tensor] = {}
        self._views: dict[torch.device, _Views] = {}

    @torch.no_grad()
    def take(self) -> dict[str, str]:
        """Norms (``p``) and weighted sums (``w``) of parameters, norms of gradients (``g``, -1: none, or not seen).

        Each is float32 in base64. All parameters must be `is_plain`. Reads each of them once and waits once per device,
        twice where the middle of a gradient is 0.
        """
        found = np.zeros((3, len(self.parameters)), dtype=np.float32)
        found[2] = NO_GRADIENT
        places_of: dict[torch.device, list[int]] = {}
        for place, parameter in enumerate(self.parameters):
            places_of.setdefault(parameter.device, []).append(place)
        gradients_of = self._gradients()
        for device, places in places_of.items():
            parameters = [self.parameters[place] for place in places]
            given = gradients_of.get(device, {})
            found[:2, places], slopes = self._take_on(device, parameters, list(given.values()))
            found[2, list(given)] = slopes
        return {key: _pack(row) for key, row in zip("pwg", found, strict=True)}

    @torch.no_grad()
    def take_gradients(self) -> str:
        """The norms of gradients alone, as `take` gives them under ``g``."""
        found = np.full(len(self.parameters), NO_GRADIENT, dtype=np.float32)
        for device, given in self._gradients().items():
            gradients = list(given.values())
            steep = [_window(gradient) for gradient in gradients]
            found[list(given)] = _slopes(self._join(device, steep), steep, gradients)
        return _pack(found)

    def _gradients(self) -> dict[torch.device, dict[int, Tensor]]:
        """The gradients that are looked at, by device and the place of their parameter."""
        found: dict[torch.device, dict[int, Tensor]] = {}
        for place in self._sampled:
            parameter = self.parameters[place]
            gradient = _plain_gradient(parameter)
            if gradient is not None and gradient.device == parameter.device:
                found.setdefault(gradient.device, {})[place] = gradient
        return found

    def _take_on(self, device: torch.device, parameters: list[Tensor], gradients: list[Tensor]) -> tuple[Any, Any]:
        views = self._views_of(device, parameters)
        steep = [_window(gradient) for gradient in gradients]
        numbers = self._join(device, [_norms(parameters), *views.windows, *steep])
        begin, middle = len(parameters), len(parameters) + len(views.weights)
        values = numbers[begin:middle]
        values *= views.weights
        return np.stack([numbers[:begin], _sums(values, views.sizes)]), _slopes(numbers[middle:], steep, gradients)

    def _views_of(self, device: torch.device, parameters: list[Tensor]) -> _Views:
        # Making views takes as long as reading what they show: kept while the parameters lie where they did.
        addresses = [parameter.data_ptr() for parameter in parameters]
        views = self._views.get(device)
        if views is None or views.addresses != addresses:
            self._views[device] = views = _Views(addresses, parameters)
        for place in views.copied:
            views.windows[place] = _window(parameters[place])
        return views

    def _join(self, device: torch.device, pieces: list[Tensor]) -> Any:
        """All numbers of `pieces` on the CPU, one after the other, in float32 that may be written to."""
        num = sum(piece.numel() for piece in pieces)
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < num:
            self._buffers[device] = buffer = torch.empty(num, dtype=torch.float32, device=device)
        torch.cat(pieces, out=buffer[:num])
        return buffer[:num].cpu().numpy()


class LastWindows:
    """Copies a few elements of two of `parameters` before every step: what ranks are compared by at the end of a job.

    After its last step a program may do with weights what it likes, on one rank as well: load the best, or an average.
    `places`: of these two.
    """

    def __init__(self, parameters: Sequence[Tensor], places: list[int]) -> None:
        self.places = places
        self._parameters = [parameters[place] for place in places]
        self._addresses: list[int] = []
        self._windows: list[Tensor] = []
        self._buffer: Tensor | None = None
        self._copied: Any = None  # a CUDA event

    @classmethod
    def of(cls, parameters: Sequence[Tensor]) -> LastWindows | None:
        """From the middle one and the last; None where none can be read in part."""
        places = [place for place, one in enumerate(parameters) if _is_readable(one, parameters[-1].device)]
        return cls(parameters, sorted({places[(len(places) - 1) // 2], places[-1]})) if places else None

    def copy(self) -> None:
        """Copy the elements as they are now. It waits for nothing."""
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if addresses != self._addresses:
            self._addresses = addresses
            self._look_at_parameters()
        if self._buffer is not None:
            torch.cat(self._windows, out=self._buffer)
            if self._copied is not None:
                self._copied.record(_CUDA.current_stream(self._buffer.device))

    def _look_at_parameters(self) -> None:
        device = self._parameters[0].device
        self._buffer = None
        if all(_is_readable(parameter, device) for parameter in self._parameters):
            self._windows = [_window(parameter.detach())[:LAST_WINDOW] for parameter in self._parameters]
            size = sum(window.numel() for window in self._windows)
            self._buffer = torch.empty(size, dtype=torch.float32, device=device)
            self._copied = _CUDA.Event() if device.type == "cuda" else None

    def taken(self) -> LastCopy | None:
        """What was copied last, which needs the parameters no more; None where nothing was."""
        if self._buffer is None:
            return None
        return LastCopy(self.places, [window.numel() for window in self._windows], self._buffer, self._copied)


class LastCopy(NamedTuple):
    """The newest copy of a `LastWindows`: elements of the parameters at `places`, as many of each as `sizes` says."""

    places: list[int]
    sizes: list[int]
    buffer: Tensor
    copied: Any

    def fingerprint(self, until_s: float) -> dict[str, str] | None:
        """Norms, weighted sums and no gradients, as `Fingerprinter.take`; None where a GPU is busy until `until_s`, or
        has failed.
        """
        numbers = self.buffer.numpy().copy() if self.copied is None else self._read_from_gpu(until_s)
        if numbers is None:
            return None
        norms = np.sqrt(_sums(numbers * numbers, self.sizes))
        sums = _sums(numbers * np.concatenate([_WEIGHTS[:size] for size in self.sizes]), self.sizes)
        none = np.full(len(self.sizes), NO_GRADIENT)
        return {key: _pack(row.astype(np.float32)) for key, row in zip("pwg", (norms, sums, none), strict=True)}

    def _read_from_gpu(self, until_s: float) -> Any:
        try:
            while not self.copied.query():
                if time.monotonic() > until_s:
                    return None
                time.sleep(0.001)
            # The current stream may be stuck behind a collective that will never end.
            with _CUDA.stream(_CUDA.Stream(self.buffer.device)):
                return self.buffer.cpu().numpy()
        except RuntimeError:  # an error of a kernel before, which the program has seen
            return None


class _Views:
    """The windows of `parameters`, which lie at `addresses`, and what they are weighted with, one after the other."""

    def __init__(self, addresses: list[int], parameters: list[Tensor]) -> None:
        self.addresses = addresses
        self.windows = [_window(parameter) for parameter in parameters]
        self.copied = [place for place, each in enumerate(parameters) if not each.is_contiguous()]
        self.sizes = [window.numel() for window in self.windows]
        self.weights = np.concatenate([_WEIGHTS[:size] for size in self.sizes])


def _is_readable(parameter: Tensor, device: torch.device) -> bool:
    """Whether a view of its elements, which lie in a row on `device`, is all that it takes to copy some."""
    is_known = parameter.device == device and device.type in ("cpu", "cuda")
    return is_known and is_plain(parameter) and parameter.is_contiguous()


def _plain_gradient(parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    return gradient if gradient is not None and is_plain(gradient) else None


def _slopes(numbers: Any, steep: list[Tensor], gradients: list[Tensor]) -> Any:
    """The norms of `gradients`, of whose windows, `steep`, these are the elements."""
    numbers *= numbers
    roots = np.sqrt(_sums(numbers, [window.numel() for window in steep]))
    flat = [at for at, root in enumerate(roots) if root == 0 and gradients[at].numel() > WINDOW]
    if flat:
        roots[flat] = _norms([gradients[at] for at in flat]).cpu().numpy()
    return roots


def _pack(numbers: Any) -> str:
    return base64.b64encode(numbers.tobytes()).decode()


def _norms(tensors: list[Tensor]) -> Tensor:
    dtypes = {tensor.dtype for tensor in tensors}
    # The squares of half precision overflow.
    if not dtypes.isdisjoint((torch.float16, torch.bfloat16)):
        return torch.stack(torch._foreach_norm(tensors, 2, torch.float32)).float()
    norms = torch._foreach_norm(tensors, 2)
    return torch.stack([norm.float() for norm in norms] if len(dtypes) > 1 else norms).float()


def _window(tensor: Tensor) -> Tensor:
    """Up to `WINDOW` elements of `tensor` from its middle row on, whatever its layout; all of a small one.

    A view where they lie in a row, else a copy.
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
    """The sum of each run of `sizes` elements of `numbers`."""
    if len(set(sizes)) == 1:  # most tensors have more elements than a window: much faster
        return numbers.reshape(len(sizes), sizes[0]).sum(axis=1, dtype=np.float64)
    sums = np.zeros(len(sizes))
    starts: Any = np.cumsum(sizes) - sizes
    # Of an empty run `reduceat` would return the next one's first element.
    filled = [at for at, size in enumerate(sizes) if size]
    if filled:
        sums[filled] = np.add.reduceat(numbers, starts[filled], dtype=np.float64)
    return sums
