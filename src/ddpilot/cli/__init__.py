# SPDX-License-Identifier: Apache-2.0
"""The `ddpilot` command: thin wrappers of functions that scripts can call too. Imports every floor below."""
