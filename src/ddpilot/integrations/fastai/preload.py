# SPDX-License-Identifier: Apache-2.0
"""Imported before ranks are forked: the slow dependencies of fastai, without fastai itself.

At import time, fastai and fastcore check for IPython to decide how progress and tables are shown.
"""

from __future__ import annotations

from ddpilot.integrations.libraries import import_quietly

import_quietly("pandas", "matplotlib.pyplot", "spacy", "scipy.stats", "sklearn.metrics", "torchvision")
