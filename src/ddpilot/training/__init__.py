# SPDX-License-Identifier: Apache-2.0
"""Custom training loops with the same results at any world_size: `Loop`, updates, metrics and checkpoints."""
