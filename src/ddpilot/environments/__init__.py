# SPDX-License-Identifier: Apache-2.0
"""Who am I: the rank, sizes and addresses of this process, found once in a mapping of environment variables."""
