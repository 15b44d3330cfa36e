# SPDX-License-Identifier: Apache-2.0
"""Rules that find errors of training in what the ranks' guards noted: one module per subject."""
