# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at an fsspec URL: upload in the background, list, prune, download. Imports modules of `checkpoint`."""
