# SPDX-License-Identifier: Apache-2.0
"""The ``ddpilot`` command: each subcommand is a thin wrapper of a function that scripts can call too."""
