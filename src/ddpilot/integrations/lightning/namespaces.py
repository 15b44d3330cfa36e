# SPDX-License-Identifier: Apache-2.0
"""The import names under which Lightning is installed: one library in two packages. Imports neither."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class Namespace:
    """Where the parts of one Lightning are: of `lightning`, or of the older `pytorch_lightning`."""

    trainer: str
    fabric: str

    @property
    def is_installed(self) -> bool:
        """Whether it could be imported; looks at the package's folder alone."""
        return find_spec(self.trainer.partition(".")[0]) is not None

    @property
    def is_loaded(self) -> bool:
        """Whether this process has imported its Trainer or its Fabric."""
        return self.trainer in sys.modules or self.fabric in sys.modules

    def of_trainer(self, name: str) -> Any:
        """The module `name` beside the Trainer."""
        return importlib.import_module(f"{self.trainer}.{name}")

    def of_fabric(self, name: str) -> Any:
        """The module `name` beside Fabric."""
        return importlib.import_module(f"{self.fabric}.{name}")


LIGHTNING = Namespace("lightning.pytorch", "lightning.fabric")
PYTORCH_LIGHTNING = Namespace("pytorch_lightning", "lightning_fabric")
NAMESPACES = (LIGHTNING, PYTORCH_LIGHTNING)


def namespace_of(value: object) -> Namespace:
    """The Lightning that the class of `value` is made from."""
    for cls in type(value).__mro__:
        for namespace in NAMESPACES:
            if f"{cls.__module__}.".startswith((f"{namespace.trainer}.", f"{namespace.fabric}.")):
                return namespace
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is no class of Lightning's")
