# SPDX-License-Identifier: Apache-2.0
"""NCCL's log, as NCCL_DEBUG=INFO writes it: parse it and explain it. Does not import torch."""
