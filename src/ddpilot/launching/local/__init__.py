# SPDX-License-Identifier: Apache-2.0
"""Run ranks on this machine, forked from a rank server: a process that has imported torch but not used it."""
