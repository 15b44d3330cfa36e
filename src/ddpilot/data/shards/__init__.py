# SPDX-License-Identifier: Apache-2.0
"""Datasets of shards, of which each rank and worker reads its own. Imports `data`'s modules."""
