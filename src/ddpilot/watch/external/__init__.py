# SPDX-License-Identifier: Apache-2.0
"""Watch ranks that torchrun, srun or mpirun started; imports `observer` and below."""
