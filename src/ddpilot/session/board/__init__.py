# SPDX-License-Identifier: Apache-2.0
"""The board: what every rank is doing now, as text and as HTML."""
