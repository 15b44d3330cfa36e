# SPDX-License-Identifier: Apache-2.0
"""What `import torch` calls to have the device `emu`: see tests/accelerator/__init__.py."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys

NAME = "emu_C"


def autoload() -> None:
    """Load the compiled device, name it, and register its module and its collectives."""
    from torch.utils.backend_registration import rename_privateuse1_backend

    path = os.environ.get("EMU_LIBRARY")
    if not path:
        raise RuntimeError("EMU_LIBRARY names no file: take the environment from tests.accelerator.environment()")
    loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    loader.exec_module(sys.modules[NAME])
    rename_privateuse1_backend("emu")
    for part in ("device", "collectives"):  # each registers itself when it is imported
        if importlib.util.find_spec(f"emu_accelerator.{part}") is not None:
            importlib.import_module(f"emu_accelerator.{part}")
