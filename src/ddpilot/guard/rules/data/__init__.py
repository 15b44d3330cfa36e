# SPDX-License-Identifier: Apache-2.0
"""Rules on what ranks read, shuffle, draw and evaluate. Imports `rules.rule`, `record` and `source`."""
