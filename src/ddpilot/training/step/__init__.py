# SPDX-License-Identifier: Apache-2.0
"""One update: batch, forward, backward, optimizer step, averages. Imports `checks`, `models`, `coordination`."""
