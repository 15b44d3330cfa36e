# SPDX-License-Identifier: Apache-2.0
"""The command `ddpilot`: thin, every verb calls a function that a script can call."""
