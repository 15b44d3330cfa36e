# SPDX-License-Identifier: Apache-2.0
"""Measurements over a group: the time of an all_reduce, and the clocks of its nodes."""
