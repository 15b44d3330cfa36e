# SPDX-License-Identifier: Apache-2.0
"""Measure in a rank what the group needs for a bucket, and how clocks of nodes differ. Imports torch."""
