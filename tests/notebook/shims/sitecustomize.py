# SPDX-License-Identifier: Apache-2.0
"""On the path of a test's kernel and ranks: makes a torchvision importable that was built for another torch.

The registries' torchvision is built for CUDA and cannot load its compiled operators beside a torch for the CPU; then
its import fails, although no model or transform needs them. Declaring the two operators that it names is enough.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import runpy
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, _target: Any = None) -> ModuleSpec | None:
        """Declare the operators before torchvision is looked for; others find it."""
        if name == "torchvision":
            sys.meta_path.remove(self)
            _declare(PathFinder.find_spec(name, path))
        return None


def _declare(torchvision: ModuleSpec | None) -> None:
    import torch  # not when a process starts: few of them need it

    operators: Any = torch.ops
    libraries: Any = torch.library
    if torchvision is None or torchvision.origin is None:
        return
    try:
        operators.load_library(torchvision.origin.replace("__init__.py", "_C.so"))
    except OSError:
        library = libraries.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        libraries.of_torchvision = library  # as long as torch: a garbage collection would take the operators away


sys.meta_path.insert(0, _Finder())
# Python imports one module of this name only.
runpy.run_path(str(Path(__file__).parents[2] / "children" / "sitecustomize.py"))
