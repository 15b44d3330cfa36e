# SPDX-License-Identifier: Apache-2.0
"""The two packages under which Lightning is installed. Imports neither."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class Namespace:
    """Import names of one Lightning: of `lightning`, or of the older `pytorch_lightning`."""

    trainer: str
    fabric: str

    @property
    def is_installed(self) -> bool:
        """True if it is installed; only looks for the top-level package."""
        return find_spec(self.trainer.partition(".")[0]) is not None

    @property
    def is_loaded(self) -> bool:
        """True if this process has imported its Trainer or its Fabric."""
        return self.trainer in sys.modules or self.fabric in sys.modules

    def of_trainer(self, name: str) -> Any:
        """Import the module `name` of the Trainer's package."""
        return importlib.import_module(f"{self.trainer}.{name}")

    def of_fabric(self, name: str) -> Any:
        """Import the module `name` of Fabric's package."""
        return importlib.import_module(f"{self.fabric}.{name}")


LIGHTNING = Namespace("lightning.pytorch", "lightning.fabric")
PYTORCH_LIGHTNING = Namespace("pytorch_lightning", "lightning_fabric")
NAMESPACES = (LIGHTNING, PYTORCH_LIGHTNING)


def namespace_of(value: object) -> Namespace:
    """Return the namespace of the Lightning class from which `value`'s class derives. Raises TypeError without one."""
    for cls in type(value).__mro__:
        for namespace in NAMESPACES:
            if f"{cls.__module__}.".startswith((f"{namespace.trainer}.", f"{namespace.fabric}.")):
                return namespace
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is not a Lightning class")
