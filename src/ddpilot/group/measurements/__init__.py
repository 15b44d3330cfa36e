# SPDX-License-Identifier: Apache-2.0
"""Measurements over a group: the time of an all_reduce (imports torch), and the clocks of its nodes."""
