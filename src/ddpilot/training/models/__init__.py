# SPDX-License-Identifier: Apache-2.0
"""Models and optimizers as `prepare` returns them. Imports `training.options` only."""
