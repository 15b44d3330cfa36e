# SPDX-License-Identifier: Apache-2.0
"""Compare what a program computes on one rank and on several: `ddpilot verify`. Torch only in ranks."""
