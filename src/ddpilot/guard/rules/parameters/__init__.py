# SPDX-License-Identifier: Apache-2.0
"""Compare parameters and gradients of all ranks: since when they differ, and why. Imports `rules.rule`."""
