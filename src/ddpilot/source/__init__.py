# SPDX-License-Identifier: Apache-2.0
"""What a program's text says about ranks, branches, loops and handlers.

Built on the standard library's `ast`; imports nothing of ddpilot and knows nothing of collectives.
"""
