# SPDX-License-Identifier: Apache-2.0
"""Imported before the ranks are forked: what makes fastai's import slow, without fastai itself.

fastai and fastcore look at IPython while they are imported, and decide by it how progress and tables are shown.
"""

from __future__ import annotations

import contextlib
import importlib

for _name in ("pandas", "matplotlib.pyplot", "scipy.stats", "sklearn.metrics", "spacy", "torchvision"):
    # One that is not there, or that does not go with this torch, says so in the cell that needs it.
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        importlib.import_module(_name)
