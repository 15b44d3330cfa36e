# SPDX-License-Identifier: Apache-2.0
"""Loaders that give each rank its piece of the global batches, equal at any world size. Imports `errors` only."""
