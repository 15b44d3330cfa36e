# SPDX-License-Identifier: Apache-2.0
"""Check machine and ranks before a job runs: `ddpilot doctor`. Torch only in ranks. Imports every floor below."""
