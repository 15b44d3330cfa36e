# SPDX-License-Identifier: Apache-2.0
"""One update: batch, forward and backward pass, optimizer step, averages. Imports `checks`, `models`, `coordination`."""
