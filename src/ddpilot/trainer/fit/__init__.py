# SPDX-License-Identifier: Apache-2.0
"""What `Trainer.fit` does on each rank. Imports `trainer`'s modules below `trainer.trainer`."""
