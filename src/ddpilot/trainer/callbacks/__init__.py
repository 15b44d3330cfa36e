# SPDX-License-Identifier: Apache-2.0
"""The callbacks of `Trainer`, one public class per module. Imports `trainer`'s modules below `core`."""
