# SPDX-License-Identifier: Apache-2.0
"""Divide global batches among ranks, equally at any world size, and load each rank's piece. Imports `errors` only."""
