# SPDX-License-Identifier: Apache-2.0
"""Check a program from one process to several ranks: `ddpilot doctor train.py`. Torch only in ranks. Imports verify."""
