# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: directories that are written atomically, verified when read, and resumed exactly."""
