# SPDX-License-Identifier: Apache-2.0
"""torch settings that affect results, copied from this process to the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class TorchSettings:
    """The settings of the process that creates it. Reading and setting them does not initialize a GPU."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    matmul_precision: str = field(default_factory=torch.get_float32_matmul_precision)
    is_deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    only_warns: bool = field(default_factory=torch.is_deterministic_algorithms_warn_only_enabled)
    cudnn_benchmark: bool = field(default_factory=lambda: torch.backends.cudnn.benchmark)
    cudnn_deterministic: bool = field(default_factory=lambda: torch.backends.cudnn.deterministic)

    def apply(self) -> None:
        """Apply the settings in this process."""
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.only_warns)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
