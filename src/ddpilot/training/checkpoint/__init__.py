# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: directories written atomically, checked when they are read, and resumed exactly."""
