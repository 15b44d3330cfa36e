# SPDX-License-Identifier: Apache-2.0
"""Pickle functions and values; send them and file descriptors to ranks and back. Imports `launching.system_limits`."""
