# SPDX-License-Identifier: Apache-2.0
"""Display of the ranks' output: lines are labelled and merged, rich displays are compared between ranks."""
