# SPDX-License-Identifier: Apache-2.0
"""Measure in each rank how long the phases of its updates take; override its options. Uses torch, imports guard."""
