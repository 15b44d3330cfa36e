# SPDX-License-Identifier: Apache-2.0
"""Watch ranks that torchrun, srun or mpirun started: the setup in each rank, and the observer process of a node.

Imports `observer` and what is below it, and the connection between agents from `launching.elastic`.
"""
