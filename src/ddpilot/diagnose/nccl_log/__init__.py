# SPDX-License-Identifier: Apache-2.0
"""NCCL's log, as NCCL_DEBUG=INFO writes it: read it, and say what it means. Does not import torch."""
