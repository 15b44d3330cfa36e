# SPDX-License-Identifier: Apache-2.0
"""Send functions, values and file descriptors between parent and ranks. Imports `launching.system_limits`."""
