# SPDX-License-Identifier: Apache-2.0
"""Line up the ranks' collectives by group and number: mismatches, waits, cycles, exits. Imports `snapshot`.

Contains no text for users.
"""
