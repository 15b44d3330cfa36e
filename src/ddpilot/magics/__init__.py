# SPDX-License-Identifier: Apache-2.0
"""`%ddp` and `%%ddp` for IPython and Jupyter. Imports `session` and `output`; calls methods of `Session` only."""
