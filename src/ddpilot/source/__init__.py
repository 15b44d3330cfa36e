# SPDX-License-Identifier: Apache-2.0
"""Analyze a program's text for ranks, branches, loops and handlers. Imports only `user_files`.

Built on the standard library's `ast`; it knows nothing of collectives.
"""
