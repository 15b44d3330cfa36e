# SPDX-License-Identifier: Apache-2.0
"""Pickle functions, arguments and results between parent and ranks: cloudpickle by value, data in memory files."""
