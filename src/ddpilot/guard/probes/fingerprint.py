# SPDX-License-Identifier: Apache-2.0
"""Two numbers for each parameter and one for its gradient, by which ranks can be told apart without a collective."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

WINDOW = 256
"""Elements from the middle of each parameter and gradient that its second number is made of. Of a parameter, a weighted
sum: what has the same norm, an orthogonal matrix or one with other signs, differs there. Of a gradient, the norm: one
that was not reduced differs everywhere, and where the middle is 0 (rows of an embedding) all of it is taken."""

_HASH = np.arange(1, WINDOW + 1, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(1 << 32)
_WEIGHTS = (_HASH / float(1 << 31) - 1.0).astype(np.float32)
NO_GRADIENT = -1.0


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
    """Takes fingerprints, into memory that it keeps: touching fresh memory takes longer than the sums."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def take(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> dict[str, str]:
        """Norms (``p``) and weighted sums (``w``) of `parameters`, norms of `gradients` (``g``, -1: there is none).

        Each is float32 in base64. All tensors must be `is_plain`. Reads every parameter once and waits once per device,
        twice where the middle of a gradient is 0.
        """
        found = np.zeros((3, len(parameters)), dtype=np.float32)
        found[2] = NO_GRADIENT
        places_of: dict[torch.device, list[int]] = {}
        for place, parameter in enumerate(parameters):
            places_of.setdefault(parameter.device, []).append(place)
        for device, places in places_of.items():
            found[:, places] = self._take_on(
                device, [parameters[place] for place in places], [gradients[place] for place in places]
            )
        return {key: base64.b64encode(row.tobytes()).decode() for key, row in zip("pwg", found, strict=True)}

    def _take_on(self, device: torch.device, parameters: list[Tensor], gradients: list[Tensor | None]) -> Any:
        given = [(place, gradient) for place, gradient in enumerate(gradients) if gradient is not None]
        windows = [_window(parameter) for parameter in parameters]
        steep = [_window(gradient) for _, gradient in given]
        norms = torch.stack(_norms(parameters)).float()
        numbers = self._join(device, [norms, *windows, *steep])
        found = np.full((3, len(parameters)), NO_GRADIENT, dtype=np.float32)
        sizes = [window.numel() for window in windows]
        begin, middle = len(parameters), len(parameters) + sum(sizes)
        found[0] = numbers[:begin]
        values, slopes = numbers[begin:middle], numbers[middle:]
        values *= np.concatenate([_WEIGHTS[:size] for size in sizes])
        found[1] = _sums(values, sizes)
        slopes *= slopes
        roots = np.sqrt(_sums(slopes, [window.numel() for window in steep]))
        flat = [at for at, root in enumerate(roots) if root == 0 and given[at][1].numel() > WINDOW]
        if flat:
            roots[flat] = torch.stack(_norms([given[at][1] for at in flat])).float().cpu().numpy()
        found[2, [place for place, _ in given]] = roots
        return found

    def _join(self, device: torch.device, pieces: list[Tensor]) -> Any:
        """All numbers of `pieces` on the CPU, one after the other, in float32 that may be written to."""
        num = sum(piece.numel() for piece in pieces)
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < num:
            self._buffers[device] = buffer = torch.empty(num, device=device)
        torch.cat([piece.reshape(-1) for piece in pieces], out=buffer[:num])
        return buffer[:num].cpu().numpy()


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    # The squares of half precision overflow.
    if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors):
        return [*torch._foreach_norm(tensors, 2, torch.float32)]
    norms = torch._foreach_norm(tensors, 2)
    return [norm.float() for norm in norms] if len({norm.dtype for norm in norms}) > 1 else [*norms]


def _window(tensor: Tensor) -> Tensor:
    """Up to `WINDOW` elements from the middle of `tensor`, as a view; none where a large one's do not lie in a row."""
    num = tensor.numel()
    if tensor.is_contiguous():
        size = min(num, WINDOW)
        return tensor.as_strided((size,), (1,), tensor.storage_offset() + (num - size) // 2)
    return tensor.reshape(-1) if num <= WINDOW else tensor[:0].reshape(-1)


def _sums(numbers: Any, sizes: list[int]) -> Any:
    """The sum of each run of `sizes` elements of `numbers`."""
    sums = np.zeros(len(sizes))
    starts: Any = np.cumsum(sizes) - sizes
    # Of an empty run `reduceat` would return the next one's first element.
    filled = [at for at, size in enumerate(sizes) if size]
    if filled:
        sums[filled] = np.add.reduceat(numbers, starts[filled], dtype=np.float64)
    return sums
