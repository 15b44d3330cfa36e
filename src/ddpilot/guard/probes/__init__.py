# SPDX-License-Identifier: Apache-2.0
"""Probes: note in the ranks what training does. Imports `guard.probe`, `guard.notes` and `record`."""
