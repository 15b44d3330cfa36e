# SPDX-License-Identifier: Apache-2.0
"""`%ddp` and `%%ddp` for IPython and Jupyter, and how a notebook shows what ranks say."""
