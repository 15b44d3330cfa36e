# SPDX-License-Identifier: Apache-2.0
"""Run one cell or request until it has ended on all ranks, then restart dead ranks. Imports `kernels` and below."""
