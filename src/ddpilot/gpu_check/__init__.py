# SPDX-License-Identifier: Apache-2.0
"""`ddpilot gpu-check`: check ddpilot's claims about accelerators on this machine. Imports every floor below."""
