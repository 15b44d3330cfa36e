# SPDX-License-Identifier: Apache-2.0
"""Facts about this process and machine: rank and sizes, NVIDIA devices, private files. Imports `errors`."""
