# SPDX-License-Identifier: Apache-2.0
"""Run one cell on all ranks until it has ended; afterwards restart dead ranks. Imports `kernels` and below."""
