# SPDX-License-Identifier: Apache-2.0
"""What runs inside a rank that stays: a Jupyter kernel with a few requests of ddpilot's own."""
