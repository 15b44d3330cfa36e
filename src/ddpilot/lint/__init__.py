# SPDX-License-Identifier: Apache-2.0
"""`ddpilot lint`: find DDP faults in a program's text. Imports `source` and `findings`; free of torch."""
