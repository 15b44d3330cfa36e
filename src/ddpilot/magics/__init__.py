# SPDX-License-Identifier: Apache-2.0
"""`%ddp` and `%%ddp` for IPython and Jupyter: thin wrappers of `Session`. Imports `session` and below."""
