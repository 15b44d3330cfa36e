# SPDX-License-Identifier: Apache-2.0
"""The parent's side of the ranks' kernels: start, exchange messages, end. Imports `protocol` and below."""
