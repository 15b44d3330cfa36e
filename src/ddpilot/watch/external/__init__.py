# SPDX-License-Identifier: Apache-2.0
"""Watch ranks that torchrun, srun or mpirun started. Imports `observer`, `nodes` and below.

Contains the setup in each rank and the observer process of a node. Observers connect through `launching.elastic`.
"""
