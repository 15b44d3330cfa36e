# SPDX-License-Identifier: Apache-2.0
"""The rules of `ddpilot lint`, by subject. Imports `lint.rule` and what is below it."""
