# SPDX-License-Identifier: Apache-2.0
"""Render job scripts for Slurm, submit and follow jobs, and name why they ended. Imports `launching`; no torch."""
