# SPDX-License-Identifier: Apache-2.0
"""`ddpilot gpu-check`: what ddpilot claims about accelerators, checked on the machine it runs on."""
