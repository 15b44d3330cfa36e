# SPDX-License-Identifier: Apache-2.0
"""Save a run and resume it. Imports `models`, `coordination` and `training.options`."""
