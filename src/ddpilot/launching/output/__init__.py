# SPDX-License-Identifier: Apache-2.0
"""Show ranks' output: split it into lines, label them by rank, and merge identical lines of several ranks."""
