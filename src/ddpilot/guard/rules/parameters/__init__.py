# SPDX-License-Identifier: Apache-2.0
"""Rules on parameters that differ between ranks: since when, and why. Imports `rules.rule` and `record`."""
