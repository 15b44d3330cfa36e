# SPDX-License-Identifier: Apache-2.0
"""Functions, arguments and results between parent and ranks: cloudpickle by value, bytes in one memory file."""
