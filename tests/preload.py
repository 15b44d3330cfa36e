# SPDX-License-Identifier: Apache-2.0
"""What the rank servers of tests import: the same for all that can share a server, which takes 3 s to start."""

from __future__ import annotations

from ddpilot.module_names import TRAINER_PRELOAD

BESIDES_TRAINER = ("torch.distributed.optim", "pytest")
"""For the launcher of a `Trainer`, which adds its own: a sharded optimizer, and what modules of tests import."""

SKLEARN = ("sklearn.model_selection", "sklearn.datasets")
"""Also scikit-learn, which the examples with digits import: 1 s. Its OpenBLAS must start no thread before ranks are
forked, so launch with `WITH_SKLEARN`."""

WITH_SKLEARN = {"OPENBLAS_NUM_THREADS": "1"}
"""Variables of such a launch."""

PRELOAD = (*TRAINER_PRELOAD, *BESIDES_TRAINER)
"""Also the compiler, which the first optimizer of a process imports, and the loop. Each rank would take 0.2 s for the
loop and pytest alone, half of the time of a small training."""

OF_SESSIONS = ("torch._dynamo",)
"""Besides what sessions preload: the first model or optimizer of each rank would import it, 1 s."""
