# SPDX-License-Identifier: Apache-2.0
"""`ddpilot verify`: compare what a program computes on one rank and on several. Imports `updates` and the launcher."""
