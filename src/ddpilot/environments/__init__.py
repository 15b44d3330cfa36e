# SPDX-License-Identifier: Apache-2.0
"""Detect the rank, sizes and addresses of this process from a mapping of environment variables, and NVIDIA devices."""
