# SPDX-License-Identifier: Apache-2.0
"""Joint decisions of ranks: stops, reduced values, memory errors. Imports `batches` and `notices`."""
