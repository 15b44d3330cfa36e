# SPDX-License-Identifier: Apache-2.0
"""Training loops with the same results at any world_size. Imports `checkpoint`, `data`, `launching` and below."""
