# SPDX-License-Identifier: Apache-2.0
"""Joint decisions and exchanges of ranks: stops, values, rows, memory errors. Imports batches and notices."""
