# SPDX-License-Identifier: Apache-2.0
"""Data loading: each global batch has the same samples at any world size, and each rank reads its piece of it."""
