# SPDX-License-Identifier: Apache-2.0
"""Whether ranks read, shuffle, draw and evaluate what they should. Imports `rules.rule`."""
