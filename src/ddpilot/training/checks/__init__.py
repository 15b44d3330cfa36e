# SPDX-License-Identifier: Apache-2.0
"""Checks that losses, gradients and buffers are right on all ranks. Imports `models`, `batches` and `losses`."""
