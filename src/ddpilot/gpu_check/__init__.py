# SPDX-License-Identifier: Apache-2.0
"""`ddpilot gpu-check`: checks ddpilot's claims about accelerators on this machine."""
