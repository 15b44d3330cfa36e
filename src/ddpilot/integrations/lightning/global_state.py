# SPDX-License-Identifier: Apache-2.0
"""Global settings and random states of torch, NumPy and Python, copied from the notebook to the ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy
import torch


@dataclass(frozen=True)
class GlobalState:
    """The state that Lightning's own strategies copy too. CUDA's generators are omitted: reading initializes CUDA."""

    deterministic: bool
    deterministic_warn_only: bool
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    matmul_precision: str
    default_dtype: torch.dtype
    random_states: tuple[Any, Any, torch.Tensor]

    @classmethod
    def capture(cls) -> GlobalState:
        """Capture the current state of this process."""
        return cls(
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            cudnn_benchmark=torch.backends.cudnn.benchmark,
            cudnn_deterministic=torch.backends.cudnn.deterministic,
            matmul_precision=torch.get_float32_matmul_precision(),
            default_dtype=torch.get_default_dtype(),
            random_states=(random.getstate(), numpy.random.get_state(), torch.get_rng_state()),
        )

    def restore(self) -> None:
        """Restore the state in this process."""
        now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        # Setting it imports the compiler, which takes a second.
        if now != (self.deterministic, self.deterministic_warn_only):
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warn_only)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.set_default_dtype(self.default_dtype)
        for_python, for_numpy, for_torch = self.random_states
        random.setstate(for_python)
        numpy.random.set_state(for_numpy)
        torch.set_rng_state(for_torch)
