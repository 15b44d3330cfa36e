# SPDX-License-Identifier: Apache-2.0
"""One update: batch, forward and backward pass, optimizer step. Imports `checks`, `models`, `coordination`."""
