# SPDX-License-Identifier: Apache-2.0
"""Probe of the data in training: loaders, inputs of DDP models, randomness, losses, and reductions by the program."""
