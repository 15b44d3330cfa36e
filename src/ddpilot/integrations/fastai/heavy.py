# SPDX-License-Identifier: Apache-2.0
"""Imported before the ranks are forked: what makes fastai's import slow, without fastai itself.

fastai and fastcore look at IPython while they are imported, and decide by it how progress and tables are shown.
"""

from __future__ import annotations

from ddpilot.integrations.preloading import import_quietly

import_quietly("pandas", "matplotlib.pyplot", "spacy", "scipy.stats", "sklearn.metrics", "torchvision")
