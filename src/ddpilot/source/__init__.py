# SPDX-License-Identifier: Apache-2.0
"""What a program's text says about ranks, branches, loops and handlers; imports the standard library only."""
