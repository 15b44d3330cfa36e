# SPDX-License-Identifier: Apache-2.0
"""Where the time of an update goes on each rank, and what to change. Torch only in ranks. Imports guard."""
