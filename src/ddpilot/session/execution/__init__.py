# SPDX-License-Identifier: Apache-2.0
"""Run one cell or request until it has ended on all ranks, and recover. Imports `kernels` and below."""
