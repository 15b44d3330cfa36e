# SPDX-License-Identifier: Apache-2.0
"""Save a run with its position in the data, and resume it. Imports `models`, `coordination`, `training.options`."""
