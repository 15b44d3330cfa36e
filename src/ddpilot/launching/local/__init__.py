# SPDX-License-Identifier: Apache-2.0
"""Ranks on this machine, forked from a rank server that has imported torch and used nothing of it."""
