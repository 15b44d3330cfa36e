# SPDX-License-Identifier: Apache-2.0
"""The state of all ranks at one moment, and the readers that fill it. Imports `record` and `source`."""
