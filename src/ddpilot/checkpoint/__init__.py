# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and weights files: written atomically, verified when read. Knows groups, but no loops."""
