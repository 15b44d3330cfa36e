# SPDX-License-Identifier: Apache-2.0
"""`%ddp` and `%%ddp` for IPython and Jupyter, parsed by `parser`: thin wrappers of `Session`. Imports `session`."""
