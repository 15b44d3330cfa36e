# SPDX-License-Identifier: Apache-2.0
"""Whether ranks' parameters stay equal; if not, since when and why. Imports `rules.rule`."""
