# SPDX-License-Identifier: Apache-2.0
"""Rules that find errors in training from what the ranks' guards noted: one module per subject."""
