# SPDX-License-Identifier: Apache-2.0
"""Analyze the source text of a program: ranks, branches, loops and handlers.

Built on the standard library's `ast`; imports only `user_files` of ddpilot and knows nothing of collectives.
"""
