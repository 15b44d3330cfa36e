# SPDX-License-Identifier: Apache-2.0
"""Line up the ranks' collectives by group and number: mismatches, waits, cycles, and how ranks ended.

Contains no text for users. Imports `snapshot`, `record` and what is below them.
"""
