# SPDX-License-Identifier: Apache-2.0
"""What ranks decide and exchange: stops, values, rows, memory errors. Imports batches, nested, notices."""
