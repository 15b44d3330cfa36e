# SPDX-License-Identifier: Apache-2.0
"""The checks of `ddpilot doctor`, by subject; each yields lines. Imports `facts` and what reads the machine."""
