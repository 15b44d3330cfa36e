# SPDX-License-Identifier: Apache-2.0
"""Analyse a program's text for ranks, branches, loops and handlers. Imports nothing of ddpilot.

Built on the standard library's `ast`. It knows nothing of collectives.
"""
