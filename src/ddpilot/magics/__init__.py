# SPDX-License-Identifier: Apache-2.0
"""`%ddp` and `%%ddp` for IPython and Jupyter, and the display of the ranks' output in a notebook."""
