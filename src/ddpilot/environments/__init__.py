# SPDX-License-Identifier: Apache-2.0
"""Facts of this process and machine: rank and sizes, NVIDIA devices, private files. Imports `errors`."""
