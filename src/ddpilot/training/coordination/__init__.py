# SPDX-License-Identifier: Apache-2.0
"""Joint decisions of ranks: stops, reduced values, memory errors. Imports `batch_groups` and `notices`."""
