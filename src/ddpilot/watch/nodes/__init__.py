# SPDX-License-Identifier: Apache-2.0
"""Exchange the state of ranks, guard's notes and findings between the observers of several nodes.

Imports `analysis` and what is below it, `guard.rules` and `launching.observer`.
"""
