# SPDX-License-Identifier: Apache-2.0
"""Start and supervise ranks. The parent's modules do not import torch; code that runs in a rank is in `local/rank.py`.

`local/` runs a function on forked ranks, `elastic/` is ``ddpilot run``, `shipping/` pickles, `output/` shows output.
"""
