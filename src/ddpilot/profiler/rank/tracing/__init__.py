# SPDX-License-Identifier: Apache-2.0
"""Show updates in other tools: a window of torch.profiler, and NVTX ranges for Nsight. Imports torch."""
