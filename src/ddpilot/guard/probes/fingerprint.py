# SPDX-License-Identifier: Apache-2.0
"""Two numbers for each parameter and one for its gradient, by which ranks can be told apart without a collective."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any

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


def is_plain(tensor: Any) -> bool:
    """Whether `tensor` holds its numbers here and densely: of a `DTensor`, asking for a norm is a collective."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and tensor.device.type != "meta"
        and tensor.numel() > 0
    )


class Fingerprinter:
    """Takes fingerprints of `parameters`, again and again, into memory that it keeps: fresh memory costs time.

    `always`: places of parameters whose gradients are looked at each time, besides up to 64 spread over all.
    """

    def __init__(self, parameters: Sequence[Tensor], always: Iterable[int] = ()) -> None:
        self.parameters = tuple(parameters)
        spread = range(0, len(parameters), -(-len(parameters) // MAX_GRADIENTS) or 1)
        self._sampled = sorted({*spread, *always})
        self._buffers: dict[torch.device, Tensor] = {}
        self._windows: dict[torch.device, list[Tensor]] = {}
        self._copied: dict[torch.device, list[int]] = {}
        self._addresses: dict[torch.device, list[int]] = {}

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
        sampled = [(place, _plain_gradient(self.parameters[place])) for place in self._sampled]
        for device, places in places_of.items():
            parameters = [self.parameters[place] for place in places]
            given = [(place, grad) for place, grad in sampled if grad is not None and grad.device == device]
            found[:2, places], slopes = self._take_on(device, parameters, [grad for _, grad in given])
            found[2, [place for place, _ in given]] = slopes
        return {key: base64.b64encode(row.tobytes()).decode() for key, row in zip("pwg", found, strict=True)}

    def _take_on(self, device: torch.device, parameters: list[Tensor], gradients: list[Tensor]) -> tuple[Any, Any]:
        windows = self._windows_of(device, parameters)
        steep = [_window(gradient) for gradient in gradients]
        numbers = self._join(device, [torch.stack(_norms(parameters)).float(), *windows, *steep])
        sizes = [window.numel() for window in windows]
        begin, middle = len(parameters), len(parameters) + sum(sizes)
        values, slopes = numbers[begin:middle], numbers[middle:]
        values *= np.concatenate([_WEIGHTS[:size] for size in sizes])
        slopes *= slopes
        roots = np.sqrt(_sums(slopes, [window.numel() for window in steep]))
        flat = [at for at, root in enumerate(roots) if root == 0 and gradients[at].numel() > WINDOW]
        if flat:
            roots[flat] = torch.stack(_norms([gradients[at] for at in flat])).float().cpu().numpy()
        return np.stack([numbers[:begin], _sums(values, sizes)]), roots

    def _windows_of(self, device: torch.device, parameters: list[Tensor]) -> list[Tensor]:
        # Making views takes as long as reading what they show: kept while the parameters lie where they did.
        addresses = [parameter.data_ptr() for parameter in parameters]
        if self._addresses.get(device) != addresses:
            self._addresses[device] = addresses
            self._windows[device] = [_window(parameter) for parameter in parameters]
            self._copied[device] = [place for place, each in enumerate(parameters) if not each.is_contiguous()]
        for place in self._copied[device]:
            self._windows[device][place] = _window(parameters[place])
        return self._windows[device]

    def _join(self, device: torch.device, pieces: list[Tensor]) -> Any:
        """All numbers of `pieces` on the CPU, one after the other, in float32 that may be written to."""
        num = sum(piece.numel() for piece in pieces)
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < num:
            self._buffers[device] = buffer = torch.empty(num, device=device)
        torch.cat(pieces, out=buffer[:num])
        return buffer[:num].cpu().numpy()


def _plain_gradient(parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    return gradient if gradient is not None and is_plain(gradient) else None


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    # The squares of half precision overflow.
    if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors):
        return [*torch._foreach_norm(tensors, 2, torch.float32)]
    norms = torch._foreach_norm(tensors, 2)
    return [norm.float() for norm in norms] if len({norm.dtype for norm in norms}) > 1 else [*norms]


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
    sums = np.zeros(len(sizes))
    starts: Any = np.cumsum(sizes) - sizes
    # Of an empty run `reduceat` would return the next one's first element.
    filled = [at for at, size in enumerate(sizes) if size]
    if filled:
        sums[filled] = np.add.reduceat(numbers, starts[filled], dtype=np.float64)
    return sums
