# SPDX-License-Identifier: Apache-2.0
"""What ranks print: cut into lines, labelled by rank, the same line of several ranks shown once."""
