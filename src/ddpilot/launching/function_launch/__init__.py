# SPDX-License-Identifier: Apache-2.0
"""Run one function on ranks of this machine to its end. Imports `spawning` and what is below it."""
