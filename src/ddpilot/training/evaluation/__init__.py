# SPDX-License-Identifier: Apache-2.0
"""Metrics and predictions of a whole dataset, at any world_size. Imports `models` and `batch_groups`."""
