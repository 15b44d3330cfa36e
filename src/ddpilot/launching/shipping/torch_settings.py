# SPDX-License-Identifier: Apache-2.0
"""`OnRank`: a function that runs on a rank with the parent's torch settings. Does not import torch at import time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class TorchSettings:
    """Global settings of torch that affect results. CUDA's generators are omitted: reading them initializes CUDA."""

    default_dtype: torch.dtype
    matmul_precision: str
    is_deterministic: bool
    only_warns: bool
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    random_states: tuple[Any, Any, torch.Tensor] | None
    """States of Python, NumPy and torch on the CPU; None to keep those of the process."""

    @classmethod
    def capture(cls, *, with_random: bool = False) -> TorchSettings:
        """Return the settings of this process, with its random states if `with_random`."""
        import numpy
        import torch

        states = (random.getstate(), numpy.random.get_state(), torch.get_rng_state()) if with_random else None
        return cls(
            default_dtype=torch.get_default_dtype(),
            matmul_precision=torch.get_float32_matmul_precision(),
            is_deterministic=torch.are_deterministic_algorithms_enabled(),
            only_warns=torch.is_deterministic_algorithms_warn_only_enabled(),
            cudnn_benchmark=torch.backends.cudnn.benchmark,
            cudnn_deterministic=torch.backends.cudnn.deterministic,
            random_states=states,
        )

    def apply(self) -> None:
        """Apply the settings in this process."""
        import numpy
        import torch

        now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if now != (self.is_deterministic, self.only_warns):  # setting it imports the compiler, which takes a second
            torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.only_warns)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.set_default_dtype(self.default_dtype)
        if self.random_states is not None:
            for_python, for_numpy, for_torch = self.random_states
            random.setstate(for_python)
            numpy.random.set_state(for_numpy)
            torch.set_rng_state(for_torch)


class OnRank:
    """Calls `function` with the torch settings of the process that created this object.

    `label`: the name of the public method that was called, which errors show. `with_random`: also set Python's, NumPy's
    and torch's random states.
    """

    def __init__(self, function: Callable[..., Any], label: str, *, with_random: bool = False) -> None:
        self._settings = TorchSettings.capture(with_random=with_random)
        self._function = function
        self.__qualname__ = label

    def __call__(self, *args: Any) -> Any:
        self._settings.apply()
        return self._function(*args)
