# SPDX-License-Identifier: Apache-2.0
"""The callbacks of `Trainer`, by subject. Imports `trainer`'s modules below `core`."""
