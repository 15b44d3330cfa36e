# SPDX-License-Identifier: Apache-2.0
"""Checkpointing of a loop: which objects are saved, when, and how training resumes."""
