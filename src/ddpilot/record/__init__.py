# SPDX-License-Identifier: Apache-2.0
"""Record collectives and guard's notes in files that survive a rank. Imports `environments` and `user_files`."""
