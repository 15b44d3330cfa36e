# SPDX-License-Identifier: Apache-2.0
"""What the observers of several nodes send each other; imports `analysis` and below, and `guard.rules`."""
