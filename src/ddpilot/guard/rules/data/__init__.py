# SPDX-License-Identifier: Apache-2.0
"""Rules about data: samples read, shuffled, drawn and evaluated. Imports `rules.rule`."""
