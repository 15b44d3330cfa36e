# SPDX-License-Identifier: Apache-2.0
"""The status board: what every rank is doing now, rendered as text and as HTML."""
