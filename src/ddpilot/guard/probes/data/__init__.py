# SPDX-License-Identifier: Apache-2.0
"""What is trained on: loaders, what goes into DDP models, randomness, losses, and what the program reduces."""
