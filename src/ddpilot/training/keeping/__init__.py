# SPDX-License-Identifier: Apache-2.0
"""What a loop keeps, when it saves it, and how it goes on from there."""
